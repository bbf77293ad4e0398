"""Numbers as text."""

from depthlm.counts import duration_text


def test_a_duration_has_at_most_two_units():
    for seconds, text in (
        (0, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (1080, "18 min"), (3599, "1 h"), (11_520, "3 h 12 min"),
        (86_399, "1 day"), (90_000, "1 day 1 h"), (172_799, "2 days"), (400_000, "4 days 15 h"),
    ):  # fmt: skip
        assert duration_text(seconds) == text
