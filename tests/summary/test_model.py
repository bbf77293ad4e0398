"""The command `python -m depthlm summary`."""

import json
import re
import sys

import pytest
import torch

import depthlm
from depthlm.__main__ import main
from depthlm.accounting.cost import MEASURED_MFU, count_parameters, flops_per_token, long_run_remark
from depthlm.accounting.memory import MemoryEstimator
from depthlm.build import build_model
from depthlm.config import compose
from depthlm.errors import UserError
from depthlm.locations import REPOSITORY
from depthlm.summary.model import print_summary, recomputed_flops, summarize

from ..options import configuration

SMALL = ["size=micro", "size.num_layers=2"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["depthlm", *arguments])
    main()


def test_json_has_the_documented_fields(monkeypatch, capsys):
    run(monkeypatch, "summary", "--json", "model=dca", *SMALL, "training.max_tokens=32B")
    summary = json.loads(capsys.readouterr().out)
    parameters = summary["parameters"]
    assert sum(count for part, count in parameters.items() if part != "total") == parameters["total"]
    assert summary["extra"]["parameters"] >= parameters["connection"] > 0
    assert summary["flops_per_token"] == 3 * summary["forward_flops_per_token"]
    assert set(summary["memory_per_gpu"]) == {"zero0", "zero1", "zero2", "zero3"}
    assert summary["tokens"] >= 32 * 10**9


def test_gpu_hours_follow_from_the_flops_and_the_stated_assumption(capsys):
    config = compose([*SMALL, "training.max_tokens=1T", "price=3"], here=False)
    model = depthlm.build_model(config, "meta")
    hours = flops_per_token(model, config.training.sequence_length).training * 1e12 / (0.399 * 989e12) / 3600
    print_summary(config, 4, as_json=False)
    printed = re.sub(" +", " ", capsys.readouterr().out)
    assert f"{count_parameters(model)['embedding']:,}" in printed
    assert "zero3" in printed
    assumption = "in bf16 on H100 GPUs at 39.9% of their 989 TFLOP/s, as vanilla reached"
    assert re.search(rf"GPU hours .* on 4\) {assumption}", printed)
    assert f"run, cost ${3 * hours:.2f} at $3.00 per GPU hour" in printed


def test_the_batch_that_is_advised_for_a_long_run_makes_it_shorter():
    overrides = ["size=1.5b", "training.max_tokens=50B"]
    (larger,) = re.findall(r"training\S+=\d+", long_run_remark(compose(overrides, here=False)))
    assert long_run_remark(compose([*overrides, larger], here=False)) == ""


def test_hours_assume_what_a_gpu_reached():
    measured = json.loads((REPOSITORY / "benchmarks/results/gpu-nvidia-h200/mechanisms.json").read_text())["lines"]
    assert {line["preset"]: round(line["mfu"], 3) for line in measured if line["mode"] == "graphs"} == MEASURED_MFU


def test_the_largest_micro_batch_fits_a_gpu_and_what_activation_checkpointing_saves_and_computes_again():
    config = configuration("size=360m", "size.num_layers=4", "training.batch_size=64")
    summary = summarize(config, 8)
    assert summary["memory_per_gpu"]["zero3"] < summary["memory_per_gpu"]["zero0"]
    estimator = MemoryEstimator(config, "cuda")
    for stage in (0, 3):
        sizes = summary["largest_micro_batch_size"][f"zero{stage}"]
        assert sizes["80GB"] < sizes["141GB"]
        fits, too_large = (estimator.estimate(stage, 8, sizes["80GB"] + more).total for more in (0, 1))
        assert fits <= 1.02 * 80e9
        assert too_large > 0.98 * 80e9
    costs = summary["activation_checkpointing"]
    assert list(costs) == ["false", "selective", "2", "true"]
    assert costs["false"]["memory"] == summary["memory_per_gpu"]["zero0"]
    sizes = {how: cost["largest_micro_batch_size"]["80GB"] for how, cost in costs.items()}
    assert sizes["false"] < sizes["selective"] < sizes["true"]
    assert sizes["false"] < sizes["2"] < sizes["true"]
    again = {how: cost["recomputed_flops_per_token"] for how, cost in costs.items()}
    # vanilla adds nothing to the matrix products and the attention, which are stored
    assert (again["false"], again["selective"]) == (0, 0)
    head = 2 * config.size.hidden_size * config.size.vocab_size
    assert again["true"] == summary["forward_flops_per_token"] - head
    assert again["2"] == again["true"] / 2
    # of layers that differ, those that are computed again
    mixed = build_model(configuration(*SMALL, "backbone.mixers=[delta,attention]", "size.num_layers=4"))
    assert recomputed_flops(mixed, 2, 64) == recomputed_flops(mixed, 2, 128) != recomputed_flops(mixed, True, 64) / 2
    assert recomputed_flops(mixed, True, 64) < recomputed_flops(mixed, True, 128)


def test_a_looped_decoder_has_a_summary_and_a_pipeline_has_one_without_memory(capsys):
    looped = summarize(compose(["model=depth_attention", "model.loops=2", *SMALL, "precision=bf16"], here=False), 1)
    assert 0 < looped["activation_checkpointing"]["true"]["memory"] < looped["memory_per_gpu"]["zero0"]
    pipeline = compose([*SMALL, "training.pipeline={stages: 2, chunks: 1}", "training.micro_batch_size=1"], here=False)
    assert summarize(pipeline, 2)["memory_per_gpu"] == {}
    print_summary(pipeline, 2, as_json=False)
    assert "memory per GPU: no estimate in a pipeline" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["shared_kv", "moda", "mhc"])
def test_selective_recomputation_repeats_less_than_the_mechanism_adds(model):
    summary = summarize(compose([f"model={model}", *SMALL], here=False), 1)
    again = summary["activation_checkpointing"]["selective"]["recomputed_flops_per_token"]
    assert (again > 0) == (model != "shared_kv")
    assert again <= max(0, summary["extra"]["flops_per_token"])


def test_a_decoder_that_cannot_be_traced_is_a_user_error(monkeypatch):
    monkeypatch.setattr("depthlm.model.Decoder.forward", lambda *_: torch.zeros(1, device="meta").item())
    with pytest.raises(UserError, match="vanilla cannot be traced"):
        summarize(configuration("size=micro"), 8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--io", "two_phase"], "an option of --overhead"),
        (["--overhead", "--pipeline", "P=2", "V=2"], "not allowed with"),
        (["--overhead", "model=moda"], "leave it out"),
    ],
)
def test_options_are_checked(monkeypatch, capsys, arguments, words):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "summary", *arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_experts_that_cannot_be_spread_over_the_gpus_are_refused():
    config = compose(["size=micro", "backbone=qwen3_moe", "deepspeed.experts=4"], here=False)
    with pytest.raises(UserError, match=r"deepspeed\.experts=4: must divide --gpus=6"):
        summarize(config, 6)
