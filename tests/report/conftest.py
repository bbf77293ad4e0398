from pathlib import Path

import pytest

from ..pictures import quick_pictures, rendered

__all__ = ["quick_pictures", "rendered"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own folder for runs, reports and configurations."""
    monkeypatch.chdir(tmp_path)
