from pathlib import Path

import pytest

from depthlm.report import sweep
from depthlm.sweeps import Point

from ..pictures import quick_pictures, rendered

__all__ = ["quick_pictures", "rendered"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own folder for runs, reports and configurations."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _runs_are_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the differences between the made-up runs of 40 steps mean something."""
    for name in ("FEW_UPDATES", "FEW_OF_ONE_SEED"):
        monkeypatch.setattr(sweep, name, 1)


@pytest.fixture
def real_directories() -> None:
    """The test looks at the names of run directories."""


@pytest.fixture(autouse=True)
def _plain_directories(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name run directories by their overrides: composing their real names takes longer than all else."""

    def directory(point: Point) -> str:
        return f"outputs/{'-'.join(point.overrides).replace('/', '.').replace('=', '')}"

    if "real_directories" not in request.fixturenames:
        monkeypatch.setattr(Point, "directory", property(directory))
