"""W&B never stops a run."""

from pathlib import Path
from typing import Any

import pytest
import wandb

from depthlm.config.schema import Tracker
from depthlm.training import trackers
from depthlm.training.trackers import NoTracker, WandbTracker, start_tracker


class Run:
    """What W&B gives, as far as it is used; it fails when told to."""

    def __init__(self, fails: bool = False, **settings: Any) -> None:
        self.id, self.url, self.settings, self.rows, self.fails = (
            settings.get("id") or "new",
            "url",
            settings,
            [],
            fails,
        )
        self.summary: dict[str, Any] = {}

    def log(self, row: dict[str, Any], step: int) -> None:
        if self.fails:
            raise OSError("No space left on device")
        self.rows.append((step, row))

    def finish(self) -> None:
        if self.fails:
            raise OSError("No space left on device")


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes in which W&B was asked to start; online fails."""
    asked: list[str] = []

    def init(**settings: Any) -> Run:
        asked.append(settings["mode"])
        if settings["mode"] == "online":
            raise wandb.errors.CommError("no network")
        return Run(**settings)

    monkeypatch.setattr(wandb, "init", init)
    return asked


@pytest.mark.parametrize(
    ("mode", "key", "expected"),
    [("auto", True, ["online", "offline"]), ("auto", False, ["offline"]), ("offline", True, ["offline"]),
     ("online", False, ["online", "offline"])],
)  # fmt: skip
def test_online_falls_back_to_offline(
    modes: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str, key: bool, expected: list[str]
) -> None:
    monkeypatch.setattr(trackers, "has_key", lambda: key)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tracker = start_tracker(Tracker(mode=mode), tmp_path, "name", {}, "kept")
    assert modes == expected
    assert tracker.id == "kept"


def test_a_tracker_that_cannot_start_at_all_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init(**settings: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(wandb, "init", init)
    tracker = start_tracker(Tracker(), tmp_path, "name", {}, None)
    assert isinstance(tracker, NoTracker)
    tracker.write({"step": 1})
    tracker.close(None)


def test_a_tracker_that_fails_on_the_way_is_left_alone() -> None:
    tracker = WandbTracker(Run(fails=True))
    tracker.write({"step": 1, "loss": 1.0})
    tracker.write({"step": 2, "loss": 1.0})
    tracker.close({"loss": 1.0})
    failing = WandbTracker(Run(fails=True))
    failing.close({"loss": 1.0})


def test_rows_arrive_by_step() -> None:
    run = Run()
    tracker = WandbTracker(run)
    tracker.write({"step": 3, "loss": 1.0})
    tracker.close({"validation_loss": 0.5})
    assert run.rows == [(3, {"loss": 1.0})]
    assert run.summary == {"validation_loss": 0.5}


def test_a_key_is_found_in_the_environment_or_in_netrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not trackers.has_key()
    file = tmp_path / ".netrc"
    file.write_text("machine example.org login user password secret\n")
    file.chmod(0o600)
    assert not trackers.has_key()
    file.write_text("machine api.wandb.ai login user password secret\n")
    assert trackers.has_key()
    file.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert trackers.has_key()
