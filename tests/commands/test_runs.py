"""`depthlm runs`: what it prints, and the options that do not go together."""

import json
import re

import pytest

from depthlm.commands.runs import main

from ..pictures import quick_pictures
from ..runs.made_up import ON_GPUS, root, write_run

__all__ = ["quick_pictures", "root"]


def test_json_output_contains_every_field(root, capsys):
    main(["--json", "complete"], "depthlm runs")
    (run,) = json.loads(capsys.readouterr().out)
    age = run.pop("age")
    assert age == pytest.approx(400_000, abs=60)
    assert run == {
        "directory": "outputs/default/base", "state": "complete", "model": "vanilla", "size": "micro", "step": 20,
        "tokens": 9999, "loss": 3.25, "validation_loss": 2.5, "steps": 20, "tokens_per_second": None,
        "remaining_seconds": 0.0, "gpu_hours": None, "remaining_gpu_hours": None, "failure": None,
    }  # fmt: skip


def test_the_table_shows_names_without_interpreting_markup(root, capsys):
    write_run(root, "odd/[red]name[/]", model="a[/b]")
    main([], "depthlm runs")
    printed = capsys.readouterr().out
    assert "outputs/odd/[red]name[/]" in printed
    assert "a[/b]" in printed
    assert "5 runs below outputs" in printed
    (line,) = [line for line in printed.splitlines() if "default/base" in line]
    cells = ["outputs/default/base", "complete", "vanilla", "micro", "20 / 20", "9.999K", "3.2500", "2.5000"]
    assert re.split(r"  +", line.strip()) == [*cells, "4 days 15 h"]


def test_the_table_shows_progress_gpu_hours_and_the_reason_of_a_failure(root, capsys):
    write_run(root, "gpu/begun", rows=4, environment_json=ON_GPUS)
    main(["gpu"], "depthlm runs")
    line = re.split(r"  +", capsys.readouterr().out.splitlines()[3].strip())
    # 20,000 tokens at 100 tokens/s on 8 GPUs, and 180,000 tokens to come
    assert line[4:9] == ["40 / 400", "100", "30 min", "0.44", "4"]
    main(["failed"], "depthlm runs")
    assert capsys.readouterr().out.splitlines()[3].split()[-3:] == ["2", "h", "diverged"]
