"""A file system that is read-only from the start, or becomes so during training."""

import errno
import io
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import depthlm
from depthlm.run_directory import RunDirectory
from depthlm.runs.checkpoints import read_manifest
from depthlm.training import train, trainer

from .run_files import curve


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system that is mounted read-only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", disk]).returncode:
        pytest.skip("may not mount")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_an_output_directory_on_a_read_only_file_system_is_a_mistake(small_run, read_only_disk, forks):
    done = forks.run(["train.py", *small_run(f"output_dir={read_only_disk}/run")])
    assert done.returncode == 2
    assert (
        f"output_dir={read_only_disk}/run: {read_only_disk} is not a folder that this user may write to" in done.stderr
    )
    assert "Traceback" not in done.stdout + done.stderr


class ReadOnly:
    """Makes every change below a folder fail while it is `on`, as on a disk that the kernel has made read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.on, self.refused = folder, False, 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the functions of Python that change files while the block runs."""
        functions: dict[Any, list[str]] = {os: ["mkdir", "replace", "rename", "unlink", "rmdir", "truncate"]}
        functions[io], functions[os] = ["open"], [*functions[os], "open"]
        patches = [
            mock.patch.object(module, name, self.refusing(getattr(module, name)))
            for module, names in functions.items()
            for name in names
        ]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    def refusing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a check before it."""

        def checked(path: Any, *arguments: Any, **settings: Any) -> Any:
            mode = arguments[0] if arguments else settings.get("mode", "r")
            reads = function is io.open and not {*str(mode)} & {*"wax+"}
            reads |= function.__name__ == "open" and mode == os.O_RDONLY
            if self.on and not reads and isinstance(path, (str, Path)) and Path(path).is_relative_to(self.folder):
                self.refused += 1
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return function(path, *arguments, **settings)

        return checked


@pytest.mark.parametrize(("until", "code"), [(5, 0), (9, 1)])
def test_a_file_system_that_becomes_read_only_costs_only_the_checkpoints_of_that_time(
    trained, small_run, tmp_path, monkeypatch, until, code
):
    overrides = small_run("training.max_steps=8", "training.checkpoint_every=2", "training.keep_last=9")
    run, step, calls = RunDirectory(tmp_path / "run"), trainer.train_step, []
    disk = ReadOnly(run.path)

    def counted(*arguments: Any, **settings: Any) -> Any:
        calls.append(len(calls) + 1)
        disk.on = 3 <= calls[-1] < until
        return step(*arguments, **settings)

    with monkeypatch.context() as patch, disk.installed():
        patch.setattr(trainer, "train_step", counted)
        assert train(depthlm.compose(overrides)) == code
    assert disk.refused
    log = run.log.read_text()
    assert "step-00000004 was not saved: [Errno 30] Read-only file system" in log
    assert log.count("its rows are kept in memory") == 1
    steps = [read_manifest(path).step for path in run.checkpoint_folders()]
    assert steps == ([8, 6, 2] if code == 0 else [2])
    if code:
        assert "the last checkpoint could not be written: [Errno 30] Read-only file system" in log
        assert train(depthlm.compose(overrides)) == 0
    assert curve(run.path) == curve(trained("training.max_steps=8", name="undisturbed"))
