"""`python -m depthlm evaluate` on a run's validation sets."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import depthlm
from depthlm.config.arguments import read_arguments
from depthlm.data import Manifest, Tokenizer, bytes_tokenizer, train_bpe
from depthlm.errors import UserError
from depthlm.evaluation.evaluate import Evaluate, evaluate
from depthlm.runs.records import read_run


def run(*arguments: str) -> dict[str, float]:
    return evaluate(read_arguments(Evaluate, arguments))


def direct(directory: Path, folder: Path, length: int = 48) -> tuple[float, int, int]:
    """Return nats, targets and bytes of the validation tokens, computed one window at a time in float64."""
    (split,) = Manifest.read(folder).validation.values()
    tokens = np.concatenate([np.fromfile(folder / shard.name, dtype="<u2") for shard in split.files]).astype(np.int64)
    model = depthlm.load(directory)[0].double()
    nats, targets = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, length):
            window = torch.from_numpy(tokens[start : start + length + 1])
            probabilities = model(window[None, :-1])[0].log_softmax(-1)
            nats -= float(probabilities.gather(1, window[1:, None]).sum())
            targets += len(window) - 1
    assert targets == len(tokens) - 1
    assert targets % length != 0
    text = Tokenizer.load(folder).decode(tokens[tokens != 256])
    return nats, targets, len(text.encode())


def test_every_target_counts_once(trained, token_folder):
    nats, targets, text_bytes = direct(trained, token_folder)
    found = run(f"run={trained}", "batch_size=3")
    for losses in (found, run(f"run={trained}", "batch_size=1")):
        assert losses["validation/local/loss"] == pytest.approx(nats / targets, rel=1e-6)
    assert found["validation/local/perplexity"] == pytest.approx(math.exp(nats / targets), rel=1e-5)
    assert found["validation/local/bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-6)


def test_results_of_one_checkpoint_accumulate_and_the_report_reads_them(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "run")
    (copy / "evaluation.json").write_text(json.dumps({"step": 12, "zero_shot/piqa": 0.5}))
    run(f"run={copy}")
    assert {"zero_shot/piqa", "validation/local/loss"} < json.loads((copy / "evaluation.json").read_text()).keys()
    assert read_run(copy).number("zero_shot/piqa") == 0.5
    # results of another checkpoint are not of this model
    (copy / "evaluation.json").write_text(json.dumps({"step": 6, "zero_shot/piqa": 0.5}))
    assert "zero_shot/piqa" not in run(f"run={copy}")


def test_losses_on_other_token_files_of_the_same_tokenizer(trained, token_folder):
    own = run(f"run={trained}")
    both = run(f"run={trained}", f"sets={token_folder}")
    assert both[f"validation/{token_folder.name}/loss"] == both["validation/local/loss"] == own["validation/local/loss"]
    with pytest.raises(UserError, match="two folders of this name"):
        run(f"run={trained}", f"sets={token_folder},{token_folder}")


def test_tokens_of_another_tokenizer_are_refused(trained, token_folder, tmp_path):
    folder = shutil.copytree(token_folder, tmp_path / "tokens")
    other = train_bpe(["a text of some words, and a text of more words"] * 9, 300)
    other.save(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": other.fingerprint}))
    assert other.fingerprint != bytes_tokenizer().fingerprint
    with pytest.raises(UserError, match="another tokenizer than the run's"):
        run(f"run={trained}", f"sets={folder}")


def test_a_set_whose_text_is_hidden_by_unknown_tokens_has_no_bits_per_byte(trained, token_folder, tmp_path, capsys):
    folder = shutil.copytree(token_folder, tmp_path / "hidden")
    manifest = json.loads((folder / "manifest.json").read_text())
    (split,) = manifest["validation"].values()
    split["unknown"] = split["tokens"] // 20
    (folder / "manifest.json").write_text(json.dumps(manifest))
    results = run(f"run={trained}", f"sets={folder},{token_folder}")
    assert results["validation/hidden/bits_per_byte"] is None
    assert results["validation/hidden/loss"] == results[f"validation/{token_folder.name}/loss"]
    assert results[f"validation/{token_folder.name}/bits_per_byte"] > 0
    assert "hidden: 5.0% of its tokens are unknown" in capsys.readouterr().out


def test_invalid_arguments_and_combinations_are_refused(trained):
    for given, words in (
        (["limit=3"], "limit=: has an effect only with tasks="),
        (["shots=0"], "shots=: has an effect only with tasks="),
        (["tasks=piqa", "sets=x"], "give sets= or tasks="),
    ):
        with pytest.raises(UserError, match=words):
            run(f"run={trained}", *given)
    with pytest.raises(UserError, match="5 mistakes") as error:
        run("task=paper", "batch_size=0", "precision=fp8", "verbose")
    for words in ("did you mean `tasks`", "at least 1", "fp32, bf16", "not key=value", "run=...: is missing"):
        assert words in str(error.value)
