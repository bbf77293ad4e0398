"""The harness on a run, with tasks on local data."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from transformers.modeling_outputs import CausalLMOutputWithPast

import depthlm
from depthlm.config.arguments import read_arguments
from depthlm.data import Tokenizer
from depthlm.errors import UserError
from depthlm.evaluation.evaluate import Evaluate, evaluate
from depthlm.evaluation.harness import SUITES, check_suite, language_model, load_tasks
from depthlm.evaluation.language_models import HarnessLM
from depthlm.hugging_face import export

TASK = """task: depth_words
dataset_path: json
dataset_kwargs:
  data_files: {{train: {data}, test: {data}}}
output_type: multiple_choice
training_split: train
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def run(*given: str) -> dict[str, float]:
    return evaluate(read_arguments(Evaluate, given))


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task on a local file: which of three words follows two others."""
    words, chance = ["depth", "stream", "layer", "head", "read"], random.Random(0)
    rows = [
        {
            "question": f"the {a} {b}",
            "choices": [f" {w}" for w in chance.sample(words, 3)],
            "label": chance.randrange(3),
        }
        for a in words
        for b in words
    ]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "words.yaml").write_text(TASK.format(data=tmp_path / "words.jsonl"))
    return tmp_path / "words.yaml"


def most_likely(directory: Path, data: Path) -> float:
    """Return the share of questions whose right answer is the most likely one, scoring each answer separately."""
    model = depthlm.load(directory)[0].requires_grad_(False)
    tokenizer, right = Tokenizer.load(directory), []
    for row in map(json.loads, data.read_text().splitlines()):
        scores = []
        for choice in row["choices"]:
            question, answer = tokenizer.encode_batch([row["question"], choice])
            tokens = torch.tensor([question + answer])
            probabilities = model(tokens)[0].log_softmax(-1)
            scores.append(sum(float(probabilities[len(question) + i - 1, t]) for i, t in enumerate(answer)))
        right.append(max(range(3), key=lambda i: scores[i]) == row["label"])
    return sum(right) / len(right)


def test_a_task_on_local_data_has_the_score_computed_by_hand(trained, task):
    found = run(f"run={trained}", f"tasks={task}", "shots=0,1", "batch_size=4")
    assert found["zero_shot/depth_words/acc"] == pytest.approx(most_likely(trained, task.with_suffix(".jsonl")))
    assert "one_shot/depth_words/acc" in found
    assert json.loads((trained / "evaluation.json").read_text())["zero_shot/depth_words/acc"] is not None


def ask(lm: HarnessLM, kind: str, *arguments: tuple) -> list:
    """Return the results of requests of a kind with these arguments."""
    requests = [Instance(request_type=kind, doc={}, arguments=values, idx=0) for values in arguments]
    return getattr(lm, kind)(requests, disable_tqdm=True)


ANSWERS = [("the depth of", " a stream that is read"), ("the", " layer of this head"), ("a head", " reads")]
QUESTIONS = [("the depth of", {"until": ["\n"], "max_gen_toks": 8}), ("a", {"until": ["\n"], "max_gen_toks": 8})]


@pytest.mark.slow
def test_an_export_has_the_scores_and_texts_of_its_run(trained, tmp_path, monkeypatch):
    # where transformers puts the code of an export
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = export(trained, tmp_path / "export").folder
    outside = HarnessLM(pretrained=str(folder), trust_remote_code=True, batch_size=2, device="cpu")
    model, config = depthlm.load(trained)
    ours = language_model(model, config, trained, 2, "fp32")
    for (score, greedy), (other, other_greedy) in zip(
        ask(ours, "loglikelihood", *ANSWERS), ask(outside, "loglikelihood", *ANSWERS), strict=True
    ):
        assert (score, greedy) == (pytest.approx(other, abs=1e-4), other_greedy)
    assert ask(ours, "generate_until", *QUESTIONS) == ask(outside, "generate_until", *QUESTIONS)


def test_scores_in_bf16_are_sums_in_fp32(trained):
    model, config = depthlm.load(trained)
    scores = [score for score, _ in ask(language_model(model, config, trained, 2, "bf16"), "loglikelihood", *ANSWERS)]
    exact = [score for score, _ in ask(language_model(model, config, trained, 2, "fp32"), "loglikelihood", *ANSWERS)]
    assert scores == pytest.approx(exact, rel=0.01)
    # in bf16, a sum between 32 and 64 would be a multiple of 0.25
    assert any(score % 0.125 for score in scores)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_text_ends_at_the_end_of_text_in_any_batch(trained, batch_size):
    model, config = depthlm.load(trained)
    lm, end = language_model(model, config, trained, batch_size, "fp32"), Tokenizer.load(trained).end_of_text

    def spell(input_ids, **_):
        """Return logits that choose the next letter of the alphabet, and the end of text after z."""
        last = input_ids[:, -1:]
        following = torch.where(last == ord("z"), end, last + 1)
        return CausalLMOutputWithPast(logits=torch.nn.functional.one_hot(following, model.size.vocab_size).float())

    lm.model.forward = spell
    settings = {"until": ["\n"], "max_gen_toks": 8}
    assert ask(lm, "generate_until", ("x", settings), ("t", settings)) == ["yz", "uvwxyz"]


def test_a_task_that_allows_no_examples_has_no_result_with_examples(trained, task):
    (trained / "evaluation.json").unlink(missing_ok=True)
    task.write_text(task.read_text() + "num_fewshot: 0\n")
    with pytest.raises(UserError, match=r"tasks=depth_words: allows no examples .* give it shots=0"):
        run(f"run={trained}", f"tasks={task}", "shots=0,1")
    assert {name for name in run(f"run={trained}", f"tasks={task}") if "_shot/" in name} == {
        "zero_shot/depth_words/acc"
    }


def test_tasks_that_fail_keep_the_results_of_the_others(trained, task, tmp_path, capsys):
    (trained / "evaluation.json").unlink(missing_ok=True)
    failures = {
        "raises": ("raise ValueError('no\\nnumber')", "ValueError: no"),
        "exits": ("raise SystemExit(0)", "SystemExit: 0"),
    }
    names = ["before", *failures, "after"]
    for name in names:
        text = task.read_text().replace("task: depth_words", f"task: {name}")
        if name in failures:
            (tmp_path / f"code_{name}.py").write_text(f"def process(doc, results):\n    {failures[name][0]}\n")
            text += f"process_results: !function code_{name}.process\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(SystemExit) as caught:
        run(f"run={trained}", "tasks=" + ",".join(str(tmp_path / f"{name}.yaml") for name in names))
    # sys.exit of a text prints it, and the exit code is 1
    assert "2 tasks failed, and the results of the others are kept:" in str(caught.value)
    for name, (_, words) in failures.items():
        assert f"\n  - zero_shot/{name}: {words}" in str(caught.value)
    recorded = json.loads((trained / "evaluation.json").read_text())
    assert recorded["zero_shot/before/acc"] == recorded["zero_shot/after/acc"]
    assert "zero_shot/after/acc" in capsys.readouterr().out
    assert not [key for key in recorded for name in failures if name in key]


def test_an_answer_without_a_token_or_longer_than_the_context_is_refused_with_what_to_do():
    lm = HarnessLM.__new__(HarnessLM)
    lm.backend, lm._max_length = "causal", 4
    lm.tok_encode = lambda text: [ord(character) for character in text.replace("b)", "b")]
    assert lm._encode_pair("a", "b)") == ([ord("a")], [ord("b")])
    with pytest.raises(UserError, match=r"merges the answer '\)' with the end of the text before it, 'ab'"):
        lm._encode_pair("ab", ")")
    with pytest.raises(UserError, match=r"an answer of 5 tokens, 'ccccc'\.\.\., does not fit into the .* context of 4"):
        lm._encode_pair("a", "ccccc")


def test_only_results_on_all_questions_are_written_and_relative_paths_are_those_of_the_current_folder(
    trained, task, tmp_path, monkeypatch
):
    (trained / "evaluation.json").unlink(missing_ok=True)
    assert 0 <= run(f"run={trained}", f"tasks={task}", "limit=3")["zero_shot/depth_words/acc"] <= 1
    assert not (trained / "evaluation.json").exists()
    monkeypatch.chdir(trained.parent)
    results = run(f"run={trained.name}", f"tasks={task}", f"datasets={os.path.relpath(tmp_path)}")
    assert json.loads((trained / "evaluation.json").read_text()) == results


def test_suites_have_the_metric_names_that_the_experiments_read():
    assert {name: len(suite.tasks) for name, suite in SUITES.items()} == {"paper": 8, "moda": 10}
    for name, experiment in (("paper", "depth_attention/main"), ("moda", "moda/model_size")):
        columns = depthlm.sweeps.points.load_experiment(experiment, None).columns
        read = {column.metric for column in columns.values() if "_shot/" in column.metric}
        shots = {0: "zero", 5: "five"}
        tasks = [*SUITES[name].tasks, "average"]
        assert read == {f"{shots[count]}_shot/{task}" for count in SUITES[name].shots for task in tasks}


def test_scores_of_two_suites_do_not_replace_each_other():
    check_suite(["moda"], {"step": 1, "zero_shot/piqa": 0.5, "zero_shot/copa": 0.5, "validation/lambada/loss": 1.0})
    check_suite(["piqa"], {"zero_shot/lambada": 0.5})
    with pytest.raises(UserError, match=r"tasks=moda: evaluation\.json has scores of tasks=paper, some under the same"):
        check_suite(["moda"], {"step": 1, "zero_shot/piqa": 0.5, "zero_shot/lambada": 0.5})


def test_tasks_that_draw_from_global_generators_are_the_same_each_time():
    class Manager:
        def load(self, tasks):
            return {"tasks": {"drawn": [random.random(), np.random.random()]}}

    assert load_tasks(Manager(), []) == load_tasks(Manager(), [])


def test_unknown_tasks_are_refused(trained):
    for tasks, words in (("paper,piqa", "give paper alone"), ("missing.yaml", "cannot be read")):
        with pytest.raises(UserError, match=words):
            run(f"run={trained}", f"tasks={tasks}")
