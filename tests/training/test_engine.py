"""Training depends on the interface of an engine alone."""

import pytest

from .plain_engine import build_plain_engine
from .run_files import TrainRun, losses


def test_a_second_engine_trains_saves_and_resumes(train_run: TrainRun, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = ("model=dca", "training.batch_size=8", "training.micro_batch_size=4", "deepspeed=zero0",
              "training.max_steps=8")  # fmt: skip
    deepspeed = losses(train_run(*shared, name="deepspeed"))
    monkeypatch.setattr("depthlm.training.setup.build_engine", build_plain_engine)
    undisturbed = losses(train_run(*shared, name="undisturbed"))
    resumed = train_run(*shared, name="resumed", stops=(4, 8))
    assert losses(resumed) == undisturbed
    assert undisturbed == pytest.approx(deepspeed, rel=1e-5)
