"""Several services record one run, and one that fails does not disturb the others."""

from pathlib import Path

import pytest
import wandb

from depthlm.config import compose, compose_anywhere
from depthlm.config.errors import ConfigError
from depthlm.config.schema import Tracker
from depthlm.config.validate import machine
from depthlm.runs.trackers import start_trackers

SETTINGS = {name: {"name": "any"} for name in ("model", "size", "data", "experiment")}


def test_a_service_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def init(**settings: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(wandb, "init", init)
    trackers = start_trackers(Tracker(wandb=True, tensorboard=True), tmp_path, SETTINGS, "kept", resumed_at=0)
    assert [service.service.name for service in trackers.services] == ["TensorBoard"]
    # a later process continues the W&B run
    assert trackers.id == "kept"
    trackers.write({"step": 1, "loss": 1.0})
    trackers.close(None)
    accumulator = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [event.value for event in accumulator.Scalars("loss")] == [1.0]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("none", []), ("wandb", ["wandb"]), ("[wandb,tensorboard]", ["wandb", "tensorboard"]), ("[]", []),
     ("[tensorboard,trackio]", ["tensorboard", "trackio"])],
)  # fmt: skip
def test_tracker_is_one_service_or_a_list_of_them(choice: str, expected: list[str]) -> None:
    tracker = compose_anywhere([f"tracker={choice}"]).tracker
    assert [name for name in ("wandb", "tensorboard", "trackio") if getattr(tracker, name)] == expected


def test_a_tracker_that_is_not_installed_is_an_error_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        compose(["tracker=[wandb,trackio]", "kernels=torch"])
    assert any("tracker=trackio: trackio is not installed; pip install" in text for text in error.value.errors)
