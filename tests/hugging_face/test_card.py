"""The model card: its numbers are those of the run's files, and its metadata is what the hub reads."""

import json
import math
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from matplotlib.image import imread

import depthlm
from depthlm.errors import UserError
from depthlm.hugging_face import export

ROWS = [
    {"step": 1, "tokens": 256, "loss": 5.5, "mean_loss": 5.25, "validation/local/loss": 5.125},
    {"step": 2, "tokens": 512, "loss": 1.5, "mean_loss": 1.25, "validation/local/loss": 1.0},
]
ENVIRONMENT = {
    "python": "3.11.7", "device": "a GPU", "world_size": 4, "command": ["/home/me/bin/python", "train.py"],
    "versions": {"depthlm": "0.1.0"}, "git": {"commit": "0123456789abcdef", "changed": True},
}  # fmt: skip


def write(run: Path, **files: object) -> None:
    """Write files of a run, whose checkpoint is of step 1; metrics is a list of rows."""
    for name, content in files.items():
        if name == "metrics":
            text = "".join(json.dumps(row) + "\n" for row in content)  # type: ignore[attr-defined]
            (run / "metrics.jsonl").write_text(text)
        else:
            (run / f"{name}.json").write_text(json.dumps(content))


def card_of(run: Path, **options: str) -> ModelCard:
    return ModelCard((export(run, **options).folder / "README.md").read_text())  # type: ignore[arg-type]


def test_the_card_of_a_complete_run(make_run):
    run = make_run("model=mhc", "seed=7")
    write(run, metrics=ROWS[:1], summary={"steps": 1, "unigram_entropy": 6.0}, environment=ENVIRONMENT)
    card = card_of(run, license="mit")
    data, text = card.data, card.text
    assert (data.license, data.library_name, data.pipeline_tag) == ("mit", "transformers", "text-generation")
    assert {"depthlm", "mhc"} <= {*data.tags}
    assert data.get("datasets") is None
    values = {result.metric_type: result.metric_value for result in data.eval_results}
    assert values == {"loss": 5.125, "perplexity": math.exp(5.125)}
    assert f"| validation, local | 5.1250 | {math.exp(5.125):.4f} |" in text
    assert f"| training | 5.2500 | {math.exp(5.25):.4f} |" in text
    assert "mHC ([arXiv 2512.24880](https://arxiv.org/abs/2512.24880))" in text
    assert f"| parameters | {sum(p.numel() for p in depthlm.load(run)[0].parameters()):,} (" in text
    assert "| seed | 7 |" in text
    assert "| tokens | 77 |" in text
    assert "| trained with | depthlm 0.1.0 (commit 0123456789ab with uncommitted changes) |" in text
    assert imread(run / "export/loss.png").shape[2] == 4
    assert not (run / "loss.png").exists()


def test_a_checkpoint_before_the_end_has_its_own_losses_and_no_result(make_run):
    run = make_run("training.max_steps=9")
    write(run, metrics=ROWS, evaluation={"step": 2, "validation/local/loss": 0.5})
    card = card_of(run)
    assert card.data.eval_results is None
    assert "| validation, local | 5.1250 |" in card.text
    assert "1.0000" not in card.text
    assert "| steps | 1 of 9: the run was not complete |" in card.text


def test_a_corpus_of_the_hub_is_named_and_no_path_of_this_machine_is(make_run):
    run = make_run(
        "data=fineweb_edu", "data.tokenizer=bytes", "data.source=/home/me/secret/mirror", "init_from=/srv/old"
    )  # fmt: skip
    card = card_of(run)
    assert card.data.datasets == ["HuggingFaceFW/fineweb-edu"]
    assert "[HuggingFaceFW/fineweb-edu](https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu)" in card.text
    assert "- Training data, fineweb_edu: ODC-BY 1.0, and Common Crawl's terms of use." in card.text
    assert "| started from | old |" in card.text
    assert "started from other weights and trained on" in card.text
    assert "/home" not in card.content
    assert "/srv" not in card.content


def test_a_license_that_the_hub_cannot_have_is_refused_with_the_nearest_one(make_run):
    run = make_run()
    with pytest.raises(UserError, match=r"license=MIT: must be an identifier of the hub.*; did you mean `mit`\?"):
        export(run, license="MIT")
    assert not (run / "export").exists()


def test_losses_on_two_parts_of_one_data_set_of_the_hub_stay_apart(make_run):
    run = make_run(
        "data=c4", "data.tokenizer=bytes", "data.source=/mirror", "data.validation.news.hub=allenai/c4",
        "data.validation.news.subset=realnewslike", "data.validation.books.source=/mine",
    )  # fmt: skip
    losses = {"validation/c4/loss": 1.0, "validation/news/loss": 2.0, "validation/books/loss": 3.0}
    row = {key: value for key, value in ROWS[0].items() if not key.startswith("validation/")} | losses
    write(run, metrics=[row], summary={"steps": 1, "unigram_entropy": 6.0}, environment=ENVIRONMENT)
    results = card_of(run).data.eval_results
    found = {(r.dataset_type, r.dataset_config): r.metric_value for r in results if r.metric_type == "loss"}
    assert found == {("allenai/c4", "en"): 1.0, ("allenai/c4", "realnewslike"): 2.0, ("books", None): 3.0}
