"""Fixtures of tests that draw pictures: their conftest.py imports them."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture(autouse=True)
def quick_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn, but laid out and rendered only where a test asks for `rendered`."""
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch())


@pytest.fixture
def rendered() -> None:
    """The test looks at PNGs."""
