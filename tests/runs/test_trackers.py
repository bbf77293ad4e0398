"""Failures of W&B never stop a run."""

import json
import os
import subprocess
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb

from depthlm.config.schema import Tracker
from depthlm.runs import trackers
from depthlm.runs.trackers import NoTracker, WandbTracker, start_tracker


class Run:
    """The part of a W&B run that depthlm uses; with `fails`, its calls raise."""

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
    """The modes in which W&B was started; online fails."""
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


def test_a_tracker_that_cannot_start_is_replaced_by_no_tracker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init(**settings: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(wandb, "init", init)
    tracker = start_tracker(Tracker(), tmp_path, "name", {}, None)
    assert isinstance(tracker, NoTracker)
    tracker.write({"step": 1})
    tracker.close(None)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The logged warnings."""
    warnings: list[str] = []
    monkeypatch.setattr(trackers.log, "warning", lambda text, *values: warnings.append(text % values))
    return warnings


def test_a_tracker_that_fails_stops_with_a_single_warning(warnings: list[str], tmp_path: Path) -> None:
    tracker = WandbTracker(Run(fails=True), tmp_path)
    tracker.write({"step": 1, "loss": 1.0})
    tracker.write({"step": 2, "loss": 1.0})
    tracker.close({"loss": 1.0})
    advice = f"metrics.jsonl is still written, and `wandb sync` uploads what is in {tmp_path}/wandb"
    assert warnings == [f"W&B stopped (No space left on device); {advice}"]
    failing = WandbTracker(Run(fails=True), tmp_path)
    failing.close({"loss": 1.0})
    assert len(warnings) == 2


def test_rows_are_logged_with_their_step(tmp_path: Path) -> None:
    run = Run()
    tracker = WandbTracker(run, tmp_path)
    tracker.write({"step": 3, "loss": 1.0})
    tracker.close({"validation_loss": 0.5})
    assert run.rows == [(3, {"loss": 1.0})]
    assert run.summary == {"validation_loss": 0.5}


def test_a_call_that_hangs_delays_neither_steps_nor_the_end(
    warnings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "FINISH", 0.2)
    monkeypatch.setattr(trackers, "WAITING", 3)
    run = Run()
    run.log = lambda row, step: threading.Event().wait()  # type: ignore[method-assign]
    tracker = WandbTracker(run, tmp_path)
    started = time.monotonic()
    tracker.write({"step": 1, "loss": 1.0})
    tracker.close({"validation_loss": 0.5})
    assert time.monotonic() - started < 2
    assert warnings[0].startswith("W&B stopped (it did not finish within 0 s)")
    crowded = WandbTracker(run, tmp_path)
    for step in range(10):
        crowded.write({"step": step, "loss": 1.0})
    assert warnings[1:] == [warnings[0].replace("it did not finish within 0 s", "it did not accept the last 3 rows")]


def test_a_start_that_hangs_times_out_and_the_run_keeps_its_id(
    warnings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "START", 0.2)
    monkeypatch.setattr(wandb, "init", lambda **settings: threading.Event().wait())
    tracker = start_tracker(Tracker(), tmp_path, "name", {}, "kept")
    assert isinstance(tracker, NoTracker)
    assert tracker.id == "kept"
    assert len(warnings) == 1


def test_a_folder_of_wandb_that_cannot_be_created_is_logged_once(warnings: list[str], tmp_path: Path) -> None:
    (tmp_path / "wandb").touch()
    tracker = start_tracker(Tracker(mode="offline"), tmp_path, "name", {}, "kept")
    tracker.write({"step": 1, "loss": 1.0})
    tracker.close({"loss": 1.0})
    assert isinstance(tracker, NoTracker)
    assert tracker.id == "kept"
    (warning,) = warnings
    assert warning.startswith("W&B offline failed ([Errno 20] Not a directory: ")
    assert warning.endswith("; only metrics.jsonl is written")


def services() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.name() == "wandb-core"]


def test_a_service_that_dies_does_not_delay_the_run(warnings: list[str], tmp_path: Path) -> None:
    tracker = start_tracker(Tracker(mode="offline"), tmp_path, "name", {}, None)
    tracker.write({"step": 1, "loss": 1.0})
    for service in services():
        service.kill()
        service.wait()
    started = time.monotonic()
    for step in range(2, 50):
        tracker.write({"step": step, "loss": 1.0})
    tracker.close({"loss": 1.0})
    assert time.monotonic() - started < 5
    assert len(warnings) == 1
    again = start_tracker(Tracker(mode="offline"), tmp_path, "name", {}, tracker.id)
    again.write({"step": 50, "loss": 1.0})
    again.close(None)
    assert again.id == tracker.id
    assert len(warnings) == 1
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{tracker.id}"))) in (
        1,
        2,
    )  # named by second


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="mounts a small disk")
def test_a_full_disk_does_not_stop_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk]).returncode:
        pytest.skip("may not mount")
    try:
        tracker = start_tracker(Tracker(mode="offline"), disk, "name", {}, None)
        started = time.monotonic()
        with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(b"0" * 4096)
        for step in range(500):
            tracker.write({"step": step, **{f"loss/{i}": float(step) for i in range(20)}})
        tracker.close({"loss": 1.0})
        assert time.monotonic() - started < 15
        assert "Traceback" not in capfd.readouterr().err
    finally:
        trackers.give_up()
        for service in services():
            service.kill()
            service.wait()
        subprocess.run(["umount", "-l", disk], check=True)


class Server(BaseHTTPRequestHandler):
    """A server that answers only the calls that start a W&B run; if `silent` is set, it answers none."""

    silent = threading.Event()

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"])).decode()
        if self.silent.is_set() or "graphql" not in self.path or "CreateRunFiles" in asked:
            threading.Event().wait()
        project = {"id": "p", "name": "depthlm", "entity": {"id": "e", "name": "me"}}
        run = {"id": "r", "name": "run", "displayName": "name", "config": "{}", "project": project}
        data: dict[str, Any] = {"model": {"id": "p", "bucket": None}, "project": {"run": None}}
        if "upsertBucket" in asked:
            data = {"upsertBucket": {"bucket": run, "inserted": True}}
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize("silent", [False, True], ids=["at the end", "from the start"])
def test_waiting_for_a_server_that_does_not_answer_is_limited(
    warnings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(Server, "silent", threading.Event())
    if silent:
        Server.silent.set()
    monkeypatch.setattr(trackers, "FINISH", 1.0)
    monkeypatch.setattr(trackers, "ANSWER", 2)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    trackers.give_up()  # a service of an earlier test uses another server
    started = time.monotonic()
    tracker = start_tracker(Tracker(mode="online"), tmp_path, "name", {}, None)
    assert isinstance(tracker, WandbTracker)
    for step in range(5):
        tracker.write({"step": step, "loss": 1.0})
    tracker.close({"loss": 1.0})
    assert time.monotonic() - started < 10
    server.shutdown()
    expected = "W&B online failed" if silent else "W&B stopped (it did not finish within 1 s)"
    assert len(warnings) == 1
    assert warnings[0].startswith(expected)


def test_the_api_key_is_found_in_the_environment_or_in_netrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
