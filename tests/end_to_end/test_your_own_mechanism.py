"""docs/your_own_mechanism.md, followed exactly: writes its files and runs its commands, in the order of the page.

A file is a fenced block below a line with only its name (such as `check.py`:); commands are the blocks marked sh.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import depthlm
from depthlm.config import ConfigError
from depthlm.errors import UserError
from depthlm.locations import REPOSITORY
from depthlm.runs.records import read_metrics

PAGE = (REPOSITORY / "docs/your_own_mechanism.md").read_text()
BLOCK = re.compile(r"(?:^`(?P<file>[\w./]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def script_of(page: str) -> str:
    """Return all steps of the page as one shell script that stops at the first failure."""
    lines = ["set -ex"]
    for block in BLOCK.finditer(page):
        if block["file"]:
            lines.append(f"cat > {block['file']} <<'END OF FILE'\n{block['text']}END OF FILE")
        elif block["kind"] == "sh":
            lines.append(block["text"])
    return "\n".join(lines)


# the runs take a minute
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder after all steps of the page; the checkout next to it consists of links."""
    checkout = tmp_path_factory.mktemp("reader") / "depthlm"
    checkout.mkdir()
    for name in ("train.py", "conf", "depthlm", "README.md"):
        (checkout / name).symlink_to(REPOSITORY / name)
    (checkout / ".venv").symlink_to(sys.prefix)
    done = subprocess.run(["bash", "-c", script_of(PAGE)], cwd=checkout, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "generate run=outputs/gated_skip trust=my_mechanisms.gated_skip prompt=" in done.stdout + done.stderr
    return checkout.parent / "my_work"


def test_the_page_has_the_expected_files_and_commands_and_the_loss_of_both_runs_falls(work):
    script = script_of(PAGE)
    assert script.count("END OF FILE'") == 7
    assert script.count("train.py --config-dir") == 3
    for run in ("gated_skip", "both"):
        losses = [row["loss"] for row in read_metrics(work / "outputs" / run / "metrics.jsonl")]
        assert losses[-1] < losses[0] - 1


def test_loading_the_run_requires_trust_and_warns_of_changed_code(work, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(work))
    with pytest.raises(UserError, match=r"add trust=my_mechanisms\.gated_skip ") as refused:
        depthlm.load(work / "outputs/gated_skip")
    assert str(refused.value).replace(str(work / "outputs"), "outputs") in PAGE
    _, config = depthlm.load(work / "outputs/both", trust=["my_mechanisms"])
    assert config.model.attention["_target_"] == "my_mechanisms.first_value.FirstValue"
    assert "has changed since the training" not in caplog.text
    file = work / "my_mechanisms/first_value.py"
    text = file.read_text()
    file.write_text(f"{text}# changed\n")
    depthlm.load(work / "outputs/both", trust=["my_mechanisms"])
    file.write_text(text)
    assert "code.my_mechanisms.first_value.FirstValue has changed since the training" in caplog.text


def test_the_preset_of_the_page_composes_and_mistakes_raise_the_errors_quoted_on_it(work, monkeypatch):
    monkeypatch.syspath_prepend(str(work))
    config = depthlm.compose(["model=gated_skip_moda"], config_dir=work / "my_conf")
    assert (config.model.name, config.model.connection["span"]) == ("gated_skip_moda", 2)
    for override, message in (
        ("model.connection.spn=3", "model.connection.spn=3: no such key; allowed: span"),
        ("+model.connection.spn=3", "has no such setting; allowed: span"),
        ("model.connection.span=0", "model.connection.span=0: must be a whole number of at least 1"),
        ("model.connection._target_=my_mechanisms.first_value.FirstValue",
         "not a subclass of depthlm.model.connection.Connection"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            depthlm.compose(["model/connection=gated_skip", override], config_dir=work / "my_conf")
        assert message in str(error.value)
        assert message in PAGE
