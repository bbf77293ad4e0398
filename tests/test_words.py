"""The terms that the code and its documentation use: one for each thing, the field's own."""

import re
import subprocess
from pathlib import Path

import pytest

from depthlm.locations import REPOSITORY

# what is never written, and what is written instead
WORDS = {
    r"go(?:es|ing)? on\b": "resume",
    r"bad numbers?\b": "non-finite",
    r"(?<!\.)\bt(?:old|ells?)\b": "logged, reported, printed",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\banew\b": "from scratch, again",
    r"\bfirst rank\b": "rank 0",
    r"\bsigns? of life\b": "heartbeat",
    r"\bverdicts?\b": "failure report",
    r"\blast words\b": "abort",
    r"\bnumber formats?\b": "dtype",
    r"\brooms\b": "packages",
}


def texts() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    suffixes = {".py", ".md", ".yaml", ".toml", ".sbatch"}
    return [
        name
        for name in listed.splitlines()
        if Path(name).suffix in suffixes
        and name != "tests/test_words.py"
        and not name.startswith(("docs/results/", "conf/data/"))
    ]


@pytest.mark.parametrize(("pattern", "instead"), WORDS.items())
def test_a_term_that_is_never_right_is_nowhere(pattern: str, instead: str) -> None:
    uses = [
        f"{name}:{number}: {line.strip()}"
        for name in texts()
        for number, line in enumerate(Path(REPOSITORY, name).read_text().splitlines(), 1)
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not uses, f"write {instead}:\n" + "\n".join(uses)
