"""Several services record one run, and one that fails does not disturb the others."""

from pathlib import Path

import pytest
import wandb

from depthlm.config import compose
from depthlm.config.schema import Tracker
from depthlm.config.validate import machine
from depthlm.errors import ConfigError
from depthlm.runs.trackers import Trackers, start_trackers

reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
SETTINGS = {name: {"name": "any"} for name in ("model", "size", "data", "experiment")}


def test_a_service_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    def init(**settings: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(wandb, "init", init)
    trackers = start_trackers(Tracker(wandb=True, tensorboard=True), tmp_path, SETTINGS, "kept", resumed_at=0)
    assert [service.service.name for service in trackers.services] == ["TensorBoard"]
    # a later process continues the W&B run
    assert trackers.id == "kept"
    trackers.write({"step": 1, "loss": 1.0})
    trackers.close(None)
    assert scalars(tmp_path, "loss") == [(1, 1.0)]


def test_tracker_is_one_service_or_a_list_of_them_that_are_installed(monkeypatch):
    for choice in ("none", "wandb", "[wandb,tensorboard]"):
        tracker = compose([f"tracker={choice}"], here=False).tracker
        expected = [name for name in ("wandb", "tensorboard") if name in choice]
        assert [name for name in ("wandb", "tensorboard") if getattr(tracker, name)] == expected
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        compose(["tracker=[wandb,tensorboard]", "kernels=torch"])
    assert any("tracker=tensorboard: tensorboard is not installed; pip install" in text for text in error.value.errors)


def start(folder: Path, resumed_at: int) -> Trackers:
    return start_trackers(Tracker(tensorboard=True), folder, {"seed": 1}, None, resumed_at=resumed_at)


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulator = reader.EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_scalars_have_the_steps_of_metrics_and_text_has_the_configuration_and_alerts(tmp_path):
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


def test_steps_that_are_trained_again_replace_those_of_the_process_that_was_killed(tmp_path):
    killed = start(tmp_path, 0)
    for step in (10, 20, 30):
        killed.write({"step": step, "loss": 1.0})
    killed.close(None)
    resumed = start(tmp_path, 20)
    resumed.write({"step": 30, "loss": 2.0})
    resumed.close(None)
    assert scalars(tmp_path, "loss") == [(10, 1.0), (20, 1.0), (30, 2.0)]
