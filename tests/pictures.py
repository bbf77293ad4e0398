"""What tests that draw pictures share; their conftest.py imports the fixtures."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture(autouse=True)
def quick_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn, but laid out and rendered only where a test asks for `rendered`."""
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch())


def keep_figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Return what will receive each figure that is saved, instead of its file, by the name of the file."""
    figures: dict[str, Figure] = {}

    def save(figure: Figure, path: Path, **_: object) -> None:
        path.touch()
        # it is written beside the file that it replaces
        figures[path.stem.removeprefix(".").removesuffix(".tmp")] = figure

    monkeypatch.setattr(Figure, "savefig", save)
    return figures


@pytest.fixture
def rendered() -> None:
    """The test looks at PNGs."""
