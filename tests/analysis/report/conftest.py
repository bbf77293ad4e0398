from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, reports and configurations of a test lie in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are laid out and rendered where a test asks for `rendered` alone."""
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch())


@pytest.fixture
def rendered() -> None:
    """The test looks at pictures."""
