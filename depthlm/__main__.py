"""The command line `depthlm <command> [key=value ...]`, equal to `python -m depthlm` and to the repository's scripts.

Each command imports its code only when it runs, so that `--help` and `--version` are fast.
"""

import argparse
import sys
from functools import partial
from typing import TypeVar

import depthlm
from depthlm.distributed.signals import quiet_interrupts

Schema = TypeVar("Schema")
# printed after the notice that a command was interrupted
NOTES = {
    "train": "training was not running, so nothing is lost; run the same command again",
    "prepare": "the same command resumes from the last complete file",
    "submit": "--status shows what has been submitted",
}


def train(arguments: list[str], program: str) -> None:
    """Train a run, resume it, or with -m train each point of a sweep."""
    from depthlm.commands.train import main

    main(arguments, program)


def prepare(arguments: list[str], program: str) -> None:
    """Prepare the token files of a corpus."""
    from depthlm.commands.prepare import main

    main(arguments, program)


def submit(arguments: list[str], program: str) -> None:
    """Submit a sweep as one SLURM job array, or show its progress."""
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
    parser.add_argument("--gpus", type=int, default=8, help="number of GPUs that ZeRO shards over (default 8)")
    parser.add_argument("--config-dir", help="a folder of configuration files in addition to conf/")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--overhead", action="store_true", help="print what every mechanism adds to vanilla instead")
    other.add_argument(
        "--pipeline",
        nargs=2,
        metavar=("P=8", "V=4"),
        help="print what every mechanism would send in a pipeline of P stages with V chunks of layers each instead",
    )
    parser.add_argument(
        "--io",
        choices=("one_phase", "two_phase"),
        help="with --overhead, how to count I/O: each read alone (the default), or as in Attention Residuals, Table 1",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.gpus < 1:
        parser.error(f"--gpus {parsed.gpus}: must be at least 1")
    if parsed.io and not parsed.overhead:
        parser.error("--io is an option of --overhead")
    from depthlm.config import compose
    from depthlm.summary.model import print_summary
    from depthlm.summary.overhead import print_overhead, print_pipeline

    common = parsed.overrides, parsed.config_dir, parsed.json
    if parsed.overhead:
        print_overhead(*common, two_phase=parsed.io == "two_phase")
    elif parsed.pipeline:
        print_pipeline(parsed.pipeline, *common)
    else:
        print_summary(compose(parsed.overrides, parsed.config_dir, here=False), parsed.gpus, parsed.json)


def report(arguments: list[str], program: str) -> None:
    """Write a paper's table or figure with our results beside the paper's, or compare any runs, as Markdown and PNG."""
    parser = argparse.ArgumentParser(prog=program, description=report.__doc__)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="experiment=<paper>/<name> and overrides as for train.py -m, or folders of runs; to=<folder>",
    )
    parser.add_argument("--config-dir", help="a folder of configuration files in addition to conf/")
    parsed = parser.parse_intermixed_args(arguments)
    from depthlm.report import report as write_report

    write_report(parsed.overrides, parsed.config_dir)


def evaluate(arguments: list[str], program: str) -> None:
    """Measure the loss, perplexity and bits per byte of a run, or its accuracy on lm-eval tasks."""
    from depthlm.evaluation.evaluate import Evaluate, evaluate

    evaluate(_read(program, Evaluate, arguments))


def generate(arguments: list[str], program: str) -> None:
    """Generate text with a trained run, after a prompt or after each line of a file."""
    from depthlm.evaluation.generation import Generate, write_text

    write_text(_read(program, Generate, arguments))


def export(arguments: list[str], program: str) -> None:
    """Export a run as a Hugging Face folder, which AutoModelForCausalLM loads."""
    from depthlm.commands.export import ExportArguments, export_run

    export_run(_read(program, ExportArguments, arguments))


def inspect(arguments: list[str], program: str) -> None:
    """Draw the depth mechanism of a trained run (weights, maps, magnitudes), and write the arrays."""
    from depthlm.inspect import Inspect, inspect_run

    inspect_run(_read(program, Inspect, arguments))


COMMANDS = {
    "train": train,
    "prepare": prepare,
    "submit": submit,
    "runs": runs,
    "summary": summary,
    "report": report,
    "evaluate": evaluate,
    "generate": generate,
    "export": export,
    "inspect": inspect,
}


def _read(program: str, schema: type[Schema], words: list[str]) -> Schema:
    """Parse the key=value arguments of a command; --help lists its keys."""
    from depthlm.config.arguments import describe_keys, read_arguments

    parser = argparse.ArgumentParser(
        prog=program,
        description=COMMANDS[program.split()[-1]].__doc__,
        epilog=f"keys:\n{describe_keys(schema)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("arguments", nargs="*", metavar="key=value")
    # a flag is no argument of these commands, so it is reported like a misspelt key
    parsed, flags = parser.parse_known_args(words)
    return read_arguments(schema, [*flags, *parsed.arguments])


def main(command: str | None = None, arguments: list[str] | None = None, program: str | None = None) -> None:
    """Run one command. A user error ends the process with exit code 2.

    command, arguments, program: set by the repository's scripts; None: read from the command line.
    """
    from depthlm.streams import prepare_streams

    prepare_streams()
    named = command or " ".join(sys.argv[1:2])
    quiet_interrupts(program or f"depthlm {named}".rstrip(), NOTES.get(named, ""))
    if command is None:
        command, arguments = sys.argv[1] if sys.argv[1:] else "--help", sys.argv[2:]
        if command.startswith("-"):
            _parser().parse_args([command])
    program = program or f"depthlm {command}"
    from depthlm.commands.exits import exit_on_mistake

    run, given = COMMANDS.get(command), arguments or []
    if run is None:
        exit_on_mistake("depthlm", partial(_refuse, command))
    else:
        exit_on_mistake(program, partial(run, given, program))


def _refuse(command: str) -> None:
    from depthlm.errors import UserError, join_names, nearest

    raise UserError(f"{command}: no such command; allowed: {join_names(COMMANDS)}{nearest(command, COMMANDS)}")


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:10} {run.__doc__}" for name, run in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="depthlm",
        description=f"{depthlm.__doc__}\n\ncommands:\n{listed}",
        epilog="`depthlm <command> --help` lists the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"depthlm {depthlm.__version__}")
    parser.add_argument("command")
    return parser


if __name__ == "__main__":
    main()
