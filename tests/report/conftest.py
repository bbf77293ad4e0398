from pathlib import Path

import pytest

from ..pictures import quick_pictures, rendered

__all__ = ["quick_pictures", "rendered"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, reports and configurations of a test lie in a folder of its own."""
    monkeypatch.chdir(tmp_path)
