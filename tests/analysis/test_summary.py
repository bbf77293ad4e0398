"""What `python -m depthlm summary` says, and the picture of a run."""

import json
import sys
from pathlib import Path

import pytest

import depthlm
from depthlm.__main__ import main
from depthlm.analysis import memory_per_gpu, plot_loss
from depthlm.analysis.summary import summarize


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["depthlm", *arguments])
    main()


def test_json_has_the_documented_fields(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "summary", "model=vanilla", "--json", "size=1.5b", "training.max_tokens=32B")
    summary = json.loads(capsys.readouterr().out)
    assert summary["parameters"]["total"] == 1_343_774_208
    assert sum(count for part, count in summary["parameters"].items() if part != "total") == 1_343_774_208
    assert summary["flops_per_token"] == 3 * summary["forward_flops_per_token"]
    assert set(summary["memory_per_gpu"]) == {"zero0", "zero1", "zero2", "zero3"}
    assert summary["tokens"] >= 32 * 10**9


def test_the_tables_show_the_same_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "summary", "size=1.5b")
    text = capsys.readouterr().out
    assert "1,343,774,208" in text
    assert "zero3" in text


def test_higher_stages_need_less_and_one_gpu_gains_nothing() -> None:
    config = depthlm.compose(["size=360m"])
    memory = list(summarize(config, 8)["memory_per_gpu"].values())
    assert memory == sorted(memory, reverse=True)
    assert memory[3] < memory[0]
    alone = {memory_per_gpu(1000, stage, 1, "fp32").total for stage in range(4)}
    assert alone == {16000.0}


def test_a_wrong_number_of_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "summary", "--gpus", "0")
    assert caught.value.code == 2


def test_the_loss_is_drawn_with_its_gaps(tmp_path: Path, rendered: None) -> None:
    rows = [{"step": s, "tokens": s * 1000, "loss": None if s == 2 else 5.0 / s} for s in (1, 2, 3)]
    rows[-1]["validation/set/loss"] = 2.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = plot_loss(tmp_path, unigram_entropy=4.0).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
