"""The terms that the code and its documentation use: one for each thing, the field's own."""

import re
import subprocess
from pathlib import Path

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
    suffixes, left_out = {".py", ".md", ".yaml", ".toml", ".sbatch"}, ("docs/results/", "conf/data/")
    names = [name for name in listed.splitlines() if Path(name).suffix in suffixes and not name.startswith(left_out)]
    return [name for name in names if name != "tests/test_words.py"]


def test_a_term_that_is_never_right_is_nowhere() -> None:
    patterns = {re.compile(pattern, re.IGNORECASE): instead for pattern, instead in WORDS.items()}
    uses = [
        f"{name}:{number}: write {instead}: {line.strip()}"
        for name in texts()
        for number, line in enumerate(Path(REPOSITORY, name).read_text().splitlines(), 1)
        for pattern, instead in patterns.items()
        if pattern.search(line)
    ]
    assert not uses, "\n".join(uses)
