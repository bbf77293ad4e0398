"""What a sweep prints about its points."""

import pytest

from depthlm.commands import train


def test_an_error_of_several_points_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "_printed", set())
    unprepared = "train.py: not prepared: c4\n    python data/prepare.py"
    for message in (unprepared, "another", unprepared):
        train._print_once(message)
    assert capsys.readouterr().err.splitlines() == [
        *unprepared.splitlines(),
        "another",
        "train.py: not prepared: c4 ... as above",
    ]
