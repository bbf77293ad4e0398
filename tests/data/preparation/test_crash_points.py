"""Whatever a crash leaves of a preparation, the same command completes it with the bytes of an undisturbed one."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from depthlm.data import DataError, Manifest, prepare
from depthlm.data.settings import Data

from ...crashes import Recorder, build, crashes
from .preparing import content

Local = Callable[..., Data]


def differs(local: Local, folder: Path, whole: dict[str, bytes]) -> str | None:
    """Return why the same command does not complete a folder with these files, or None."""
    try:
        prepared = content(prepare(local(path=str(folder), shard_tokens=500))["local"])
    except DataError as error:
        return str(error)
    return None if prepared == whole else "other bytes"


def states(local: Local, tmp_path: Path, unsynced: str = "") -> Iterator[str | None]:
    """Record a preparation, and yield what is wrong with each state that a crash may leave, or None."""
    whole = content(prepare(local(path="whole", shard_tokens=500))["local"])
    root, events = tmp_path / "root", tmp_path / "events"
    root.mkdir()
    with Recorder(root, events).recording(unsynced):
        prepare(local(path=str(root / "tokens"), shard_tokens=500))
    # what was lost shows in the last states
    for count, (tree, _) in enumerate(reversed([*crashes(events)]), 1):
        folder = tmp_path / f"state {count}"
        build(tree, folder)
        reason = None
        if Manifest.exists(folder / "tokens") and content(folder / "tokens") != whole:
            reason = "it is complete, and differs"
        # states differ in little; to prepare from each of them would take minutes
        elif count % 7 == 0:
            reason = differs(local, folder / "tokens", whole)
        yield reason and f"state {count}: {reason}"
        shutil.rmtree(folder)


def test_a_crash_while_text_is_prepared_costs_only_time(local, tmp_path, monkeypatch):
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 200)
    found = [*states(local, tmp_path)]
    assert [reason for reason in found if reason] == []
    assert len(found) > 250


def test_a_missing_fsync_is_noticed(local, tmp_path, monkeypatch):
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 200)
    assert any(states(local, tmp_path, "*/tokens.partial/*.bin"))
