"""`deterministic=true` works for every mechanism."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import depthlm
from depthlm.training import train, trainer

from .run_files import curve

PRESETS = sorted(path.stem for path in Path(__file__).parents[2].glob("conf/model/*.yaml"))


@pytest.fixture(autouse=True)
def any_algorithm_after_the_test() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "preset",
    [name if name == "moda" else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS],
)
def test_a_deterministic_run_gives_the_same_bits_twice(
    small_run: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    allowed, train_step = [], trainer.train_step

    def recorded(*arguments: Any) -> torch.Tensor:
        allowed.append(torch.are_deterministic_algorithms_enabled())
        return train_step(*arguments)

    monkeypatch.setattr(trainer, "train_step", recorded)
    for name in ("one", "two"):
        overrides = small_run(f"model={preset}", "training.max_steps=2", "deterministic=true", name=name)
        assert train(depthlm.compose(overrides)) == 0
    assert allowed == [True] * 4
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    one, two = (load_file(tmp_path / name / "checkpoints/step-00000002/model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_deterministic_does_not_affect_the_next_run(small_run: Callable[..., list[str]]) -> None:
    assert train(depthlm.compose(small_run("training.max_steps=1", "deterministic=true", name="one"))) == 0
    assert train(depthlm.compose(small_run("training.max_steps=1", name="two"))) == 0
    assert not torch.are_deterministic_algorithms_enabled()
