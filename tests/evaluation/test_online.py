"""Evaluations during training: the numbers of `evaluate`, on any ranks, resumable, and never the end of a run."""

import json
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import depthlm
from depthlm.config.arguments import read_arguments
from depthlm.errors import UserError
from depthlm.evaluation import online
from depthlm.evaluation.evaluate import Evaluate, evaluate
from depthlm.runs.trackers import Trackers
from depthlm.training import train
from tests.training.run_files import assert_same, weights
from tests.two_ranks import train_on_ranks

pytestmark = pytest.mark.usefixtures("only_steps")
TASKS = ["evaluation.every=4", "evaluation.tasks=[python_words]", "evaluation.shots=[0,1]"]
STEPS = ["training.max_steps=6", "training.checkpoint_every=2"]


Overrides = Callable[..., list[str]]


def rows(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the results of evaluations by step."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    found = {row["step"]: {k: v for k, v in row.items() if "_shot/" in k or "evaluation/" in k} for row in lines}
    return {step: results for step, results in found.items() if results}


@pytest.fixture
def overrides(small_run: Overrides, token_folder: Path) -> Overrides:
    """The overrides of a short run that evaluates steps 4 and 6."""
    return lambda *more, name="run": small_run(*STEPS, *TASKS, f"evaluation.sets=[{token_folder}]", *more, name=name)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def undisturbed(shared: Path, overrides: Overrides) -> Path:
    """The directory of an undisturbed run, which the first test that needs it trains."""
    directory = shared / "undisturbed"
    if not directory.exists():
        assert train(depthlm.compose(overrides(f"output_dir={directory}"))) == 0
    return directory


def test_the_results_are_those_of_evaluate_and_training_is_not_changed(undisturbed, small_run, tmp_path, token_folder):
    results = rows(undisturbed)
    assert list(results) == [4, 6]
    assert len(results[4]) == len(results[6]) == 3 + 2 * 2
    recorded = json.loads((undisturbed / "evaluation.json").read_text())
    assert recorded == {"step": 6} | results[6]
    run = f"run={undisturbed}"
    again = evaluate(read_arguments(Evaluate, [run, "tasks=python_words", "shots=0,1"]))
    assert again == recorded
    losses = evaluate(read_arguments(Evaluate, [run, f"sets={token_folder}"]))
    for name in ("loss", "perplexity", "bits_per_byte"):
        own = recorded[f"evaluation/{token_folder.name}/{name}"]
        assert own == pytest.approx(losses[f"validation/{token_folder.name}/{name}"], rel=1e-12)
    assert train(depthlm.compose(small_run(*STEPS))) == 0
    assert_same(weights(undisturbed), weights(tmp_path / "run"))


@pytest.mark.slow
def test_two_ranks_give_the_results_of_one(two_ranks, undisturbed, overrides, tmp_path):
    assert two_ranks(train_on_ranks, overrides("deepspeed=zero3")) == [0, 0]
    one, two = rows(undisturbed), rows(tmp_path / "run")
    assert list(one) == list(two) == [4, 6]
    for step in one:
        assert one[step] == pytest.approx(two[step], rel=1e-5)


def test_a_failure_is_logged_and_training_continues(overrides, tmp_path, monkeypatch, caplog):
    run_job = online.run_job

    def fail(lm: Any, job: Any, manager: Any, limit: Any) -> Any:
        if job.shots == 0:
            raise ConnectionError("the hub is down")
        return run_job(lm, job, manager, limit)

    def exhausted(*_: Any) -> Any:
        # for the first evaluation only
        monkeypatch.setattr(online, "with_weights", with_weights)
        raise RuntimeError("out of memory")

    with_weights = online.with_weights
    monkeypatch.setattr(online, "with_weights", exhausted)
    monkeypatch.setattr(online, "run_job", fail)
    caplog.set_level(logging.WARNING, "depthlm")
    assert train(depthlm.compose(overrides())) == 0
    assert [*rows(tmp_path / "run")] == [6]
    assert sorted({key.partition("/")[0] for key in rows(tmp_path / "run")[6]}) == ["evaluation", "one_shot"]
    log = (tmp_path / "run/train.log").read_text()
    assert "the evaluation of step 4 failed (RuntimeError: out of memory); training continues" in log
    assert "zero_shot/python_words cannot be evaluated (the hub is down); training continues" in log


def test_a_stop_during_an_evaluation_is_resumed_with_the_task_that_is_missing(
    overrides, undisturbed, tmp_path, monkeypatch
):
    run_job, jobs = online.run_job, []

    def stop(lm: Any, job: Any, manager: Any, limit: Any) -> Any:
        jobs.append(job.key)
        if len(jobs) == 2:
            signal.pthread_kill(main, signal.SIGTERM)
        return run_job(lm, job, manager, limit)

    main, tracked = threading.main_thread().ident or 0, []
    monkeypatch.setattr(online, "run_job", stop)
    monkeypatch.setattr(Trackers, "write", lambda self, row: tracked.append(row))
    assert train(depthlm.compose(overrides())) == 75
    assert "zero_shot/python_words/acc" in rows(tmp_path / "run")[4]
    assert tracked[-1]["step"] == 4
    assert "zero_shot/python_words/acc" in tracked[-1]
    assert train(depthlm.compose(overrides())) == 0
    words = [f"{count}_shot/python_words" for count in ("zero", "one", "one", "zero", "one")]
    assert jobs == words
    assert rows(tmp_path / "run") == rows(undisturbed)


def test_scores_on_another_number_of_questions_are_replaced(overrides, undisturbed, tmp_path, monkeypatch):
    assert train(depthlm.compose(overrides("evaluation.limit=1", "training.stop_after=4"))) == 0
    run_job = online.run_job

    def fail_second(lm: Any, job: Any, manager: Any, limit: Any) -> Any:
        if job.key.startswith("one_shot"):
            raise OSError("the hub is down")
        return run_job(lm, job, manager, limit)

    with monkeypatch.context() as patch:
        patch.setattr(online, "run_job", fail_second)
        assert train(depthlm.compose(overrides("training.stop_after=5"))) == 0
    full, found = rows(undisturbed)[4], rows(tmp_path / "run")[4]
    # the score of one question is gone, although the other was not measured
    assert found == {key: None if key.startswith("one_shot") else value for key, value in full.items()} | {
        online.LIMIT: None
    }


def test_a_mistake_is_reported_before_the_first_step(small_run, token_folder, tmp_path):
    missing = tmp_path / "task.yaml"
    missing.write_text("task: nothing\ndataset_path: json\ndataset_kwargs: {data_files: {test: /nowhere.jsonl}}\n"
                       "output_type: multiple_choice\ntest_split: test\ndoc_to_text: a\ndoc_to_choice: b\n"
                       "doc_to_target: 0\n")  # fmt: skip
    given = small_run(*STEPS, "evaluation.every=2", f"evaluation.tasks=[{missing}]")
    with pytest.raises(UserError, match=r"^evaluation\.tasks=: 1 of 1 tasks have no dataset here(.|\n)*HF_HOME"):
        train(depthlm.compose(given))
    assert not (tmp_path / "run/metrics.jsonl").exists()
