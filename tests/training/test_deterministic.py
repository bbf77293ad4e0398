"""`deterministic=true` works for every mechanism."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import depthlm
from depthlm.config import mechanisms
from depthlm.training import trainer

from .run_files import assert_same_run


@pytest.fixture(autouse=True)
def any_algorithm_after_the_test() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_a_deterministic_run_gives_the_same_bits_twice_and_does_not_affect_the_next_run(train_run, monkeypatch):
    allowed, train_step = [], trainer.train_step

    def recorded(*arguments: Any, **settings: Any) -> torch.Tensor:
        allowed.append(torch.are_deterministic_algorithms_enabled())
        return train_step(*arguments, **settings)

    monkeypatch.setattr(trainer, "train_step", recorded)
    given = ("model=moda", "training.max_steps=2")
    one, two = (train_run(*given, "deterministic=true", name=name) for name in ("one", "two"))
    assert_same_run(one, two)
    train_run("training.max_steps=1")
    assert allowed == [True] * 4 + [False]


@pytest.mark.slow
@pytest.mark.parametrize("preset", mechanisms())
def test_every_mechanism_has_deterministic_operations(preset):
    model = depthlm.build_model(depthlm.compose(["size=micro", "size.num_layers=2", f"model={preset}"]))
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    torch.use_deterministic_algorithms(True)

    def gradients() -> list[torch.Tensor]:
        loss = model(tokens[:, :-1], tokens[:, 1:]).nll
        return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)]

    assert all(torch.equal(one, two) for one, two in zip(gradients(), gradients(), strict=True))
