"""Code blocks of the pages: commands are valid, Python compiles, YAML parses.

A line with a placeholder, `...` or `<name>`, is skipped. tests/end_to_end runs the commands of your_own_mechanism.md.
"""

import re
import shlex
from collections.abc import Iterator

import pytest
import yaml

from depthlm.__main__ import COMMANDS
from depthlm.commands.export import ExportArguments
from depthlm.commands.prepare import read_options
from depthlm.commands.train import read_command_line
from depthlm.config import compose
from depthlm.config.arguments import read_arguments
from depthlm.evaluation.evaluate import Evaluate
from depthlm.evaluation.generation import Generate
from depthlm.inspect import Inspect
from depthlm.runs.listing import read_filters
from depthlm.slurm.cluster import read_cluster
from depthlm.sweeps.points import sweep_points

from .pages import blocks, page_names

PLACEHOLDER = re.compile(r"(?<!\w)\.\.\.|<\w")
SCRIPTS = {"train.py": "train", "data/prepare.py": "prepare", "slurm/submit.py": "submit"}
SCHEMAS = {"evaluate": Evaluate, "generate": Generate, "export": ExportArguments, "inspect": Inspect}
# values of an option
VALUES = {"--gpus": 1, "--io": 1, "--pipeline": 2}
# the directory of a run that the reader has trained
OF_A_RUN = ("run=", "fork_from=", "init_from=")


def commands(name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the depthlm commands of a page: the name of the command and its arguments."""
    for block in blocks(name, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if any(PLACEHOLDER.search(word) for word in words):
                continue
            for number, word in enumerate(words):
                if word in SCRIPTS:
                    yield SCRIPTS[word], words[number + 1 :]
                    break
                if words[number : number + 2] == ["-m", "depthlm"]:
                    yield words[number + 2], words[number + 3 :]
                    break


def without_options(arguments: list[str]) -> list[str]:
    """Return the arguments without options and their values."""
    remaining, skipped = [], 0
    for word in arguments:
        if word.startswith("--"):
            skipped = VALUES.get(word, 0)
        elif skipped:
            skipped -= 1
        else:
            remaining.append(word)
    return remaining


def check(command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Raise an error if a command would not accept its arguments."""
    if command in SCHEMAS:
        read_arguments(SCHEMAS[command], arguments)
        return
    if "--import-tokens" in arguments:
        assert read_options(arguments, command).import_tokens
        return
    is_sweep = command in ("submit", "report")
    if command == "train" and "--help" in arguments:
        return
    if command == "train":
        line = read_command_line(arguments)
        arguments, is_sweep = line.overrides, line.multirun
    else:
        with pytest.raises(SystemExit, match=r"^0$"):
            COMMANDS[command](["--help"], f"depthlm {command}")
        options = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
        assert {word for word in arguments if word.startswith("--")} <= options
        is_sweep = is_sweep or "-m" in arguments
        arguments = [word for word in without_options(arguments) if word != "-m"]
    if command == "runs":
        read_filters(arguments)
        return
    if command == "report" and any("=" not in word for word in arguments):
        # a folder of runs
        return
    if command == "submit":
        read_cluster([word.removeprefix("slurm.") for word in arguments if word.startswith("slurm.")])
    left_out = (*OF_A_RUN, "slurm.", "hydra/", *(("to=", "baseline=") if command == "report" else ()))
    overrides = [word for word in arguments if not word.startswith(left_out)]
    if is_sweep:
        points = sweep_points(overrides)
        overrides = points[0].overrides
    compose(overrides, here=False)


@pytest.mark.slow
def test_commands_are_valid(capsys):
    names = [name for name in page_names() if "your_own_mechanism" not in name]
    of_pages = {name: list(commands(name)) for name in names}
    assert len(of_pages["README.md"]) > 5
    assert len(of_pages["docs/commands.md"]) > 20
    # several pages have the same command
    pages = {(command, *arguments): name for name, found in of_pages.items() for command, arguments in found}
    for (command, *arguments), name in pages.items():
        try:
            check(command, arguments, capsys)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{name}: {command} {shlex.join(arguments)}\n{error!r}")


def test_python_compiles_and_yaml_parses():
    for name in page_names():
        for block in blocks(name, "python"):
            compile(block, name, "exec")
        assert all(yaml.safe_load(block) for block in blocks(name, "yaml")), name
