"""Averages of the weights, as schedule-free optimizers keep them; runs on two ranks are in test_two_ranks.py."""

from types import SimpleNamespace

import pytest
import torch

from depthlm.evaluation.evaluate import Evaluate, evaluate
from depthlm.runs.records import read_metrics
from depthlm.training.engine.optimizers import place_counters

from .run_files import curve, weights

pytest.importorskip("pytorch_optimizer")


def test_averages_are_exported_and_validations_leave_no_trace(train_run):
    once, often = (
        train_run(
            "optimizer=schedule_free", "schedule=constant", "training.max_steps=6", "training.validation_tokens=4K",
            f"training.validate_every={every}", f"training.checkpoint_every={every}", name=name,
        )
        for name, every in (("once", 100), ("often", 1))
    )  # fmt: skip
    assert curve(often) == curve(once)
    # the average of the iterates z, by the definition: y = (1 - beta) z + beta x
    file = once / "checkpoints/step-00000006/deepspeed/mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    trained, exported = state["module"], weights(once)
    names = [name for group in state["optimizer"]["param_groups"] for name in group["names"]]
    for index, name in enumerate(names):
        z = state["optimizer"]["state"][index]["z"]
        torch.testing.assert_close(0.1 * z + 0.9 * exported[name], trained[name], rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(trained[name], exported[name]) for name in names)
    summary = list(read_metrics(once / "metrics.jsonl"))[-1]
    measured = evaluate(Evaluate(run=str(once)))
    assert measured["validation/local/loss"] == pytest.approx(summary["validation/local/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
def test_counters_of_another_device_are_put_beside_fused_weights(settings, device):
    weight = torch.nn.Parameter(torch.ones(2, device="meta"))
    group = {"params": [weight], "fused": None} | settings
    optimizer = SimpleNamespace(param_groups=[group], state={weight: {"step": torch.tensor(3.0)}})
    place_counters(optimizer, None)
    assert optimizer.state[weight]["step"].device.type == device
