"""Weights or states of the optimizer that become non-finite never replace the last finite checkpoint."""

from pathlib import Path

import pytest

import depthlm
from depthlm.errors import UserError
from depthlm.training import FAILED, train
from depthlm.training.nonfinite import BadBatches

from .run_files import assert_same, assert_same_run, bad_batches, manifest, states, weights
from .spoiled import train_spoiled

SETTINGS = ("training.checkpoint_every=5", "training.keep_last=1", "training.max_steps=11")
# what is damaged after which step, and the step that notices: a checkpoint, or, between two, that of the next loss
FIRST = ("deepspeed=zero0", "weight", 7, 8)
CASES = [
    FIRST,
    ("deepspeed=zero0", "state", 10, 10),
    *(
        pytest.param(kind, damaged, 10, 10, marks=pytest.mark.slow)
        for kind, damaged in (
            ("deepspeed=zero1 precision=bf16 training.async_checkpoint=true", "state"),
            ("deepspeed=zero3", "state"), ("deepspeed=zero3_offload precision=bf16", "weight"),
        )
    ),
]  # fmt: skip
REWOUND = [
    FIRST,
    pytest.param("deepspeed=zero1 precision=bf16", "weight", 10, 10, marks=pytest.mark.slow),
    pytest.param("deepspeed=zero3", "state", 10, 10, marks=pytest.mark.slow),
]


def saved_steps(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in directory.glob("checkpoints/step-*"))


@pytest.mark.parametrize(("kind", "damaged", "step", "noticed"), CASES)
def test_a_state_that_is_not_finite_ends_the_run_and_the_last_finite_checkpoint_resumes_it(
    train_run, small_run, tmp_path, capsys, kind, damaged, step, noticed
):
    overrides = (*SETTINGS, *kind.split())
    assert train_spoiled(small_run(*overrides), {step: damaged}) == FAILED
    output = capsys.readouterr().out
    name = {"state": "exp_avg of ", "weight": ""}[damaged]
    assert f"step {noticed} ends the run: {name}" in output
    assert "weight is not finite; its batch is" in output
    assert saved_steps(tmp_path / "run") == [5]
    assert not (tmp_path / "run/summary.json").exists()
    run = train_run(*overrides)
    assert_same_run(run, train_run(*overrides, name="straight"))
    assert bad_batches(run) == []


@pytest.mark.parametrize(("kind", "damaged", "step", "noticed"), REWOUND)
def test_a_rewind_returns_to_a_finite_state(two_ranks, small_run, tmp_path, kind, damaged, step, noticed):
    overrides = (*SETTINGS, *kind.split(), "training.on_nonfinite=rewind")
    assert two_ranks(train_spoiled, small_run(*overrides), {step: damaged}, (1,)) == [0, 0]
    # the same batches are skipped as if that of this step were bad
    assert two_ranks(train_spoiled, small_run(*overrides, name="bad"), {noticed: "gradient"}) == [0, 0]
    run, bad = tmp_path / "run", tmp_path / "bad"
    assert manifest(run)["rewound"] == manifest(bad)["rewound"] == [[5, noticed]]
    assert_same(weights(run), weights(bad))
    assert_same(states(run), states(bad))
    [row] = bad_batches(run)
    assert (row["step"], row["outcome"]) == (noticed, "skipped with all steps since step 5")
    assert row["reason"].endswith("weight is not finite on rank 1")


def test_without_a_finite_checkpoint_there_is_no_rewind(small_run, tmp_path, capsys):
    overrides = small_run(*SETTINGS, "training.on_nonfinite=rewind")
    assert train_spoiled(overrides, {3: "weight"}) == FAILED
    assert "step 4 ends the run: final_norm.weight is not finite" in capsys.readouterr().out
    assert saved_steps(tmp_path / "run") == []


def test_a_checkpoint_that_is_not_finite_is_refused(small_run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        # as before such states were refused
        patch.setattr(BadBatches, "check_state", lambda _: False)
        assert train_spoiled(small_run(*SETTINGS, "training.stop_after=5"), {5: "state"}) == 0
    with pytest.raises(UserError, match=r"exp_avg of final_norm\.weight is not finite; give an older checkpoint"):
        train(depthlm.compose(small_run(*SETTINGS)))
    assert saved_steps(tmp_path / "run") == [5]
