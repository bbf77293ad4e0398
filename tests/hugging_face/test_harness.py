"""lm-eval's `--model hf` gives an export the same scores as the run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import depthlm
from depthlm.hugging_face import export
from depthlm.hugging_face.folder import as_causal_lm, as_tokenizer, unused_ids

COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
TASKS = {
    "words": {
        "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "writing": {
        "output_type": "generate_until", "doc_to_target": "{{choices[0]}}", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8},
    },
}  # fmt: skip


@pytest.mark.slow
def test_lm_eval_gives_an_export_the_scores_of_the_run(make_run: Callable[..., Path], tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    rows = [{"question": "the depth"[:end], "choices": [" of a", " xq"], "answer": end % 2} for end in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    for name, settings in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.dump({"task": name} | COMMON | settings | files))
    run = make_run("model=mhc", "model/attention=moda", "data.document_mask=true")
    folder = export(run, tmp_path / "export").folder
    model, config = depthlm.load(run)
    tokenizer, causal = as_tokenizer(run), as_causal_lm(model, config)
    causal.generation_config.suppress_tokens = unused_ids(model, tokenizer)
    # without the harness's own tasks, which are thousands of files
    manager, found = TaskManager(include_path=str(tmp_path), include_defaults=False), []
    for lm in (
        HFLM(pretrained=str(folder), trust_remote_code=True, device="cpu", batch_size=3),
        HFLM(pretrained=causal, tokenizer=tokenizer, device="cpu", batch_size=3),
    ):
        results = simple_evaluate(lm, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0)
        found.append({task: [one["resps"] for one in rows] for task, rows in results["samples"].items()})
    assert found[0]["writing"] == found[1]["writing"]
    scores = [[float(score) for row in one["words"] for ((score, _),) in row] for one in found]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert len({*scores[0]}) > 8
