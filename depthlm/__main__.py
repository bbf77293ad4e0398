"""`python -m depthlm <command> [key=value ...]`: what one does around training."""

import sys

from depthlm.interrupts import quiet_interrupts

if __name__ == "__main__":
    # the imports below take seconds
    quiet_interrupts(" ".join(["depthlm", *sys.argv[1:2]]))

import argparse

from depthlm.analysis.summary import print_overhead, print_summary
from depthlm.config import compose
from depthlm.config.arguments import Arguments, described, read_arguments
from depthlm.config.command_line import exit_on_mistake


def summary(arguments: list[str]) -> None:
    """Parameters, FLOPs and memory of a configuration, without building it."""
    parser = argparse.ArgumentParser(prog="python -m depthlm summary", description=summary.__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument("--gpus", type=int, default=8, help="ranks that ZeRO shards over (default 8)")
    parser.add_argument("--config-dir", help="a folder of configuration files besides conf/")
    parser.add_argument("--overhead", action="store_true", help="instead, what every mechanism costs beyond vanilla")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.gpus < 1:
        parser.error(f"--gpus {parsed.gpus}: at least 1")
    if parsed.overhead:
        print_overhead(parsed.overrides, parsed.config_dir, parsed.json)
        return
    print_summary(compose(parsed.overrides, parsed.config_dir, here=False), parsed.gpus, parsed.json)


def report(arguments: list[str]) -> None:
    """A paper's table or figure: ours beside the paper's, or any runs side by side, as Markdown and PNG."""
    parser = argparse.ArgumentParser(prog="python -m depthlm report", description=report.__doc__)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="experiment=<paper>/<name> and overrides as for train.py -m, or runs=a,b,c; to=<folder>",
    )
    parser.add_argument("--config-dir", help="a folder of configuration files besides conf/")
    parsed = parser.parse_intermixed_args(arguments)
    # drawing needs what the other commands do not
    from depthlm.analysis.report import report as write_report

    write_report(parsed.overrides, parsed.config_dir)


def evaluate(arguments: list[str]) -> None:
    """Loss, perplexity and bits per byte of a run on its validation sets, or its accuracy on tasks of lm-eval."""
    from depthlm.evaluation.evaluate import Evaluate, evaluate

    evaluate(_read("evaluate", Evaluate, arguments))


def generate(arguments: list[str]) -> None:
    """Text from a run: after one prompt, as it comes, or after each line of a file."""
    from depthlm.evaluation.writing import Generate, write_text

    write_text(_read("generate", Generate, arguments))


def export(arguments: list[str]) -> None:
    """A run as a folder of Hugging Face, which AutoModelForCausalLM loads."""
    from depthlm.hugging_face.command import ExportArguments, export_run

    export_run(_read("export", ExportArguments, arguments))


def inspect(arguments: list[str]) -> None:
    """Pictures of what a run does along depth: its weights, maps and magnitudes, and the arrays behind them."""
    from depthlm.analysis.inspection import Inspect, inspect_run

    inspect_run(_read("inspect", Inspect, arguments))


def doctor(arguments: list[str]) -> None:
    """What a run would meet on this machine, and what is wrong with it."""
    parser = argparse.ArgumentParser(prog="python -m depthlm doctor", description=doctor.__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the run, as for train.py")
    parser.add_argument("--config-dir", help="a folder of configuration files besides conf/")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_intermixed_args(arguments)
    from depthlm.doctor.command import doctor as examine

    sys.exit(examine(parsed.overrides, parsed.config_dir, parsed.json))


COMMANDS = {
    "summary": summary, "report": report, "evaluate": evaluate, "generate": generate, "export": export,
    "inspect": inspect, "doctor": doctor,
}  # fmt: skip


def _read(name: str, schema: type[Arguments], given: list[str]) -> Arguments:
    """The key=value arguments of a command; --help lists its keys."""
    parser = argparse.ArgumentParser(
        prog=f"python -m depthlm {name}",
        description=COMMANDS[name].__doc__,
        epilog=f"keys:\n{described(schema)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("arguments", nargs="*", metavar="key=value")
    return read_arguments(schema, parser.parse_args(given).arguments)


def main() -> None:
    """Run one command; a user's mistake ends the process with 2."""
    listed = "\n".join(f"  {name:10} {run.__doc__}" for name, run in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m depthlm",
        description=f"commands:\n{listed}",
        epilog="<command> --help tells more",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    command = parser.parse_args(sys.argv[1:2]).command
    exit_on_mistake(f"depthlm {command}", lambda: COMMANDS[command](sys.argv[2:]))


if __name__ == "__main__":
    main()
