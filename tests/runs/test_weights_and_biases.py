"""W&B gets what a run records, and its failures never stop a run."""

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb

from depthlm.config.schema import Tracker
from depthlm.runs import trackers as service
from depthlm.runs.trackers import QueuedService, Trackers, WeightsAndBiases, has_key, leave_wandb, start_trackers
from tests.runs.wandb_file import records

SETTINGS = {name: {"name": value} for name, value in (("model", "mhc"), ("size", "micro"), ("data", "stdlib"))} | {
    "experiment": {"name": None},
}


def start(folder: Path, run_id: str | None, **tracker: Any) -> Trackers:
    return start_trackers(Tracker(wandb=True, **tracker), folder, SETTINGS, run_id, resumed_at=0)


def tracked(run: Any, folder: Path) -> QueuedService:
    return QueuedService(WeightsAndBiases(run, folder))


class Run:
    """The part of a W&B run that depthlm uses."""

    def __init__(self, **settings: Any) -> None:
        self.id, self.url, self.summary = settings.get("id") or "new", "url", dict[str, Any]()

    def log(self, row: dict[str, Any], step: int) -> None:
        pass

    def finish(self) -> None:
        pass


def test_online_falls_back_to_offline(monkeypatch, tmp_path):
    asked: list[str] = []

    def init(**settings: Any) -> Run:
        asked.append(settings["mode"])
        if settings["mode"] == "online":
            raise wandb.errors.CommError("no network")
        return Run(**settings)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for mode, key, expected in (
        ("auto", True, ["online", "offline"]),
        ("auto", False, ["offline"]),
        ("offline", True, ["offline"]),
        ("online", False, ["online", "offline"]),
    ):
        asked.clear()
        monkeypatch.setattr(service, "has_key", lambda key=key: key)
        assert start(tmp_path, "kept", mode=mode).id == "kept"
        assert asked == expected


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The logged warnings."""
    warnings: list[str] = []
    monkeypatch.setattr(service.log, "warning", lambda text, *values: warnings.append(text % values))
    return warnings


def test_a_call_that_hangs_delays_neither_steps_nor_the_end(warnings, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "FINISH", 0.2)
    monkeypatch.setattr(service, "WAITING", 3)
    run = Run()
    run.log = lambda row, step: threading.Event().wait()  # type: ignore[method-assign]
    tracker = tracked(run, tmp_path)
    started = time.monotonic()
    tracker.write({"step": 1, "loss": 1.0})
    tracker.close({"validation_loss": 0.5})
    assert time.monotonic() - started < 2
    assert warnings[0].startswith("W&B stopped (it did not finish within 0 s)")
    crowded = tracked(run, tmp_path)
    for step in range(10):
        crowded.write({"step": step, "loss": 1.0})
    assert warnings[1:] == [warnings[0].replace("it did not finish within 0 s", "it did not accept the last 3 rows")]


def test_a_folder_of_wandb_that_cannot_be_created_is_logged_once(warnings, tmp_path):
    (tmp_path / "wandb").touch()
    tracker = start(tmp_path, "kept", mode="offline")
    tracker.write({"step": 1, "loss": 1.0})
    tracker.close({"loss": 1.0})
    assert not tracker.services
    assert tracker.id == "kept"
    (warning,) = warnings
    assert warning.startswith("W&B offline failed ([Errno 20] Not a directory: ")
    assert warning.endswith("; metrics.jsonl is still written")


def test_a_service_that_dies_does_not_delay_the_run(warnings, tmp_path):
    tracker = start(tmp_path, None, mode="offline")
    tracker.write({"step": 1, "loss": 1.0})
    for process in psutil.Process().children(recursive=True):
        if process.name() == "wandb-core":
            process.kill()
            process.wait()
    started = time.monotonic()
    for step in range(2, 50):
        tracker.write({"step": step, "loss": 1.0})
    tracker.close({"loss": 1.0})
    assert time.monotonic() - started < 5
    assert len(warnings) == 1


def test_waiting_for_a_server_that_does_not_answer_is_limited(warnings, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "ANSWER", 1)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    leave_wandb()  # a service of an earlier test uses another server
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracker = start(tmp_path, None, mode="online")
        tracker.write({"step": 1, "loss": 1.0})
        tracker.close({"loss": 1.0})
    assert time.monotonic() - started < 10
    assert len(warnings) == 1
    assert warnings[0].startswith("W&B online failed")


def test_the_api_key_is_found_in_the_environment_or_in_netrc(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".netrc"
    for host, is_found in (("example.org", False), ("api.wandb.ai", True)):
        file.write_text(f"machine {host} login user password secret\n")
        file.chmod(0o600)
        assert has_key() == is_found
    file.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert has_key()


def test_the_file_of_a_run_has_its_group_tags_configuration_rows_and_alerts(tmp_path):
    settings = SETTINGS | {"experiment": {"name": "moda/scaling"}, "optimizer": {"lr": 0.25}}
    tracker = Tracker(wandb=True, mode="offline", tags=["mine", "mhc"])
    trackers = start_trackers(tracker, tmp_path, settings, "kept", resumed_at=0)
    for step in (1, 2, 3):
        trackers.write({"step": step, "loss": 3.0 / step})
    trackers.alert("bad batch", "skipped: its loss is not finite", 1)
    trackers.close({"validation_loss": 0.5})
    written = records(tmp_path / "wandb")
    (run,) = [record.run for record in written if record.HasField("run")]
    assert (run.run_id, run.run_group, [*run.tags]) == ("kept", "moda/scaling", ["mhc", "micro", "stdlib", "mine"])
    assert json.loads(next(u.value_json for u in run.config.update if u.key == "optimizer")) == {"lr": 0.25}
    steps = {record.history.step.num for record in written if record.HasField("history")}
    assert steps == {1, 2, 3}
    (alert,) = [record.alert for record in written if record.HasField("alert")]
    assert (alert.title, alert.text) == ("bad batch", "step 1: skipped: its loss is not finite")
    totals = {item.key: item.value_json for r in written if r.HasField("summary") for item in r.summary.update}
    assert totals["validation_loss"] == "0.5"
