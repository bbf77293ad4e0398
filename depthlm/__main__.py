"""`depthlm <command> [key=value ...]`, the same as `python -m depthlm` and as the scripts of the repository.

Each command imports what it needs when it runs, so that help and version take no time.
"""

import argparse
import os
import sys
from typing import TypeVar

import depthlm
from depthlm.distributed.interrupts import quiet_interrupts

Schema = TypeVar("Schema")
# what a command prints when it is interrupted, besides that it was
NOTES = {
    "train": "outside of training nothing is lost, and the same command starts again",
    "prepare": "the same command resumes from the last complete file",
    "submit": "--status shows what has been submitted",
}


def train(arguments: list[str], program: str) -> None:
    """Train a run, resume it, or with -m train each point of a sweep."""
    from depthlm.commands.train import main

    main(arguments, program)


def prepare(arguments: list[str], program: str) -> None:
    """Make the token files of a corpus beforehand."""
    from depthlm.commands.prepare import main

    main(arguments, program)


def submit(arguments: list[str], program: str) -> None:
    """Submit a sweep as one SLURM job array, or show how far it is."""
    from depthlm.slurm.submit import main

    main(arguments, program)


def runs(arguments: list[str], program: str) -> None:
    """List run directories: state, model, size, tokens, losses, age."""
    from depthlm.commands.runs import main

    main(arguments, program)


def summary(arguments: list[str], program: str) -> None:
    """Print parameters, FLOPs and memory of a configuration, without building it."""
    parser = argparse.ArgumentParser(prog=program, description=summary.__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument("--gpus", type=int, default=8, help="ranks that ZeRO shards over (default 8)")
    parser.add_argument("--config-dir", help="a folder of configuration files besides conf/")
    parser.add_argument("--overhead", action="store_true", help="instead, what every mechanism costs beyond vanilla")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.gpus < 1:
        parser.error(f"--gpus {parsed.gpus}: at least 1")
    from depthlm.accounting.summary import print_overhead, print_summary
    from depthlm.config import compose

    if parsed.overhead:
        print_overhead(parsed.overrides, parsed.config_dir, parsed.json)
    else:
        print_summary(compose(parsed.overrides, parsed.config_dir, here=False), parsed.gpus, parsed.json)


def report(arguments: list[str], program: str) -> None:
    """Write a paper's table or figure, ours beside the paper's, or any runs side by side, as Markdown and PNG."""
    parser = argparse.ArgumentParser(prog=program, description=report.__doc__)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="experiment=<paper>/<name> and overrides as for train.py -m, or runs=a,b,c; to=<folder>",
    )
    parser.add_argument("--config-dir", help="a folder of configuration files besides conf/")
    parsed = parser.parse_intermixed_args(arguments)
    from depthlm.report import report as write_report

    write_report(parsed.overrides, parsed.config_dir)


def evaluate(arguments: list[str], program: str) -> None:
    """Measure the loss, perplexity and bits per byte of a run, or its accuracy on tasks of lm-eval."""
    from depthlm.evaluation.evaluate import Evaluate, evaluate

    evaluate(_read(program, Evaluate, arguments))


def generate(arguments: list[str], program: str) -> None:
    """Write text with a trained run, after a prompt or after each line of a file."""
    from depthlm.evaluation.writing import Generate, write_text

    write_text(_read(program, Generate, arguments))


def export(arguments: list[str], program: str) -> None:
    """Write a run as a Hugging Face folder, which AutoModelForCausalLM loads."""
    from depthlm.hugging_face.command import ExportArguments, export_run

    export_run(_read(program, ExportArguments, arguments))


def inspect(arguments: list[str], program: str) -> None:
    """Draw what a trained run does along depth: its weights, maps and magnitudes, and write the arrays."""
    from depthlm.inspect import Inspect, inspect_run

    inspect_run(_read(program, Inspect, arguments))


def doctor(arguments: list[str], program: str) -> None:
    """Print what a run would meet on this machine, and what is wrong with it."""
    parser = argparse.ArgumentParser(prog=program, description=doctor.__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the run, as for train.py")
    parser.add_argument("--config-dir", help="a folder of configuration files besides conf/")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_intermixed_args(arguments)
    from depthlm.doctor.command import doctor as examine

    sys.exit(examine(parsed.overrides, parsed.config_dir, parsed.json))


COMMANDS = {
    "train": train, "prepare": prepare, "submit": submit, "runs": runs, "summary": summary, "report": report,
    "evaluate": evaluate, "generate": generate, "export": export, "inspect": inspect, "doctor": doctor,
}  # fmt: skip


def _read(program: str, schema: type[Schema], given: list[str]) -> Schema:
    """The key=value arguments of a command; --help lists its keys."""
    from depthlm.config.arguments import described, read_arguments

    parser = argparse.ArgumentParser(
        prog=program,
        description=COMMANDS[program.split()[-1]].__doc__,
        epilog=f"keys:\n{described(schema)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("arguments", nargs="*", metavar="key=value")
    return read_arguments(schema, parser.parse_args(given).arguments)


def main(command: str | None = None, arguments: list[str] | None = None, program: str | None = None) -> None:
    """Run one command; a user's mistake ends the process with 2.

    command, arguments, program: as a script of the repository gives them; None: read from the command line.
    """
    named = command or " ".join(sys.argv[1:2])
    quiet_interrupts(program or f"depthlm {named}".rstrip(), NOTES.get(named, ""))
    if command is None and sys.argv[1:2] in (["-sc"], ["--shell-completion"]):
        command, arguments = "train", sys.argv[1:]
        if not _complete():
            return
    elif command is None:
        parsed = _parser().parse_args(sys.argv[1:2])
        command, arguments = parsed.command, sys.argv[2:]
    program = program or f"depthlm {command}"
    from depthlm.exits import exit_on_mistake

    run, given = COMMANDS[command], arguments or []
    exit_on_mistake(program, lambda: run(given, program))


def _complete() -> bool:
    """Prepare a shell's request for completions for Hydra, which knows overrides alone; False where it is answered."""
    line = os.environ.get("COMP_LINE")
    if line is None:
        return True
    program, *words = line.split(" ")
    if len(words) < 2:
        print(" ".join(COMMANDS))
    elif words[0] in ("train", "prepare", "submit", "summary", "report"):
        os.environ["COMP_LINE"] = " ".join([program, *words[1:]])
        return True
    return False


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:10} {run.__doc__}" for name, run in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="depthlm",
        description=f"{depthlm.__doc__}\n\ncommands:\n{listed}",
        epilog="`depthlm <command> --help` lists what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"depthlm {depthlm.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    return parser


if __name__ == "__main__":
    main()
