"""TensorBoard's own reader finds what a run has recorded."""

from pathlib import Path

import pytest

from depthlm.config.schema import Tracker
from depthlm.runs.trackers import Trackers, start_trackers

reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def start(folder: Path, resumed_at: int | None) -> Trackers:
    return start_trackers(Tracker(tensorboard=True), folder, {"seed": 1}, None, resumed_at=resumed_at)


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulator = reader.EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_scalars_have_the_steps_of_metrics_and_text_has_the_configuration_and_alerts(tmp_path: Path) -> None:
    trackers = start(tmp_path, 0)
    for step in (1, 5):
        trackers.write({"step": step, "loss": 4.0 / step, "mfu": None})
    trackers.alert("bad batch", "skipped", 5)
    trackers.close({"steps": 5, "validation_loss": 0.5, "skipped": []})
    assert scalars(tmp_path, "loss") == [(1, 4.0), (5, pytest.approx(0.8))]
    assert scalars(tmp_path, "summary/validation_loss") == [(5, 0.5)]
    accumulator = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert accumulator.Tags()["tensors"] == ["config/text_summary", "alerts/text_summary"]
    assert b"seed: 1" in accumulator.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert "mfu" not in accumulator.Tags()["scalars"]


def test_steps_that_are_trained_again_replace_those_of_the_process_that_was_killed(tmp_path: Path) -> None:
    killed = start(tmp_path, 0)
    for step in (10, 20, 30):
        killed.write({"step": step, "loss": 1.0})
    killed.close(None)
    resumed = start(tmp_path, 20)
    resumed.write({"step": 30, "loss": 2.0})
    resumed.close(None)
    assert scalars(tmp_path, "loss") == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_an_evaluation_of_an_earlier_checkpoint_hides_no_later_step(tmp_path: Path) -> None:
    training = start(tmp_path, 0)
    training.write({"step": 30, "loss": 1.0})
    training.close(None)
    evaluation = start(tmp_path, None)
    evaluation.close({"step": 20, "lambada": 0.25})
    assert scalars(tmp_path, "loss") == [(30, 1.0)]
    assert scalars(tmp_path, "summary/lambada") == [(20, 0.25)]
