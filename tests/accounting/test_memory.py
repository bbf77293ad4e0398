"""The memory estimate: states against arithmetic, activations against autograd and against the memory of a real run."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import depthlm
from depthlm.accounting.memory import MemoryEstimator
from depthlm.accounting.tracing import _Ledger, trace
from depthlm.config import mechanisms
from depthlm.data import prepare

from ..options import configuration

FAST = ["dca", "moda"]
PRESETS = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in mechanisms()]


def estimator(*overrides: str, device: str = "cuda") -> MemoryEstimator:
    return MemoryEstimator(configuration(*overrides), device)


@pytest.mark.parametrize(
    ("precision", "stage", "expected"),
    [
        ("fp32", 0, (4, 4, 8)),
        ("bf16", 0, (4, 4, 8)),
        ("bf16", 1, (2, 6, 1.5)),
        ("bf16", 2, (2, 0.5, 1.5)),
        ("fp16", 3, (0.25, 0.5, 1.5)),
    ],
)
def test_bytes_per_parameter_on_eight_gpus(precision, stage, expected):
    memory = estimator(f"precision={precision}", f"deepspeed=zero{stage}")
    states = memory.states(stage, 8)
    # AdamW also counts the steps of each parameter
    sizes = (states.weights, states.gradients, states.optimizer)
    assert tuple(size / memory.whole.parameters for size in sizes) == pytest.approx(expected, rel=1e-4)


def test_experts_that_are_spread_are_divided_and_the_shards_of_zero_are_the_same():
    config = configuration("backbone=qwen3_moe", "size=tiny", "precision=bf16", "training.sequence_length=64")
    sharding = replace(config.deepspeed, experts=4)
    whole, spread = MemoryEstimator(config, "cuda"), MemoryEstimator(replace(config, deepspeed=sharding), "cuda")
    mixtures = depthlm.build_model(config, "meta").mixtures()
    experts = sum(weight.numel() for mixture in mixtures for weight in mixture.experts.parameters())
    assert spread.rank.parameters == whole.whole.parameters - 3 * experts // 4
    assert spread.states(0, 8).weights == 4.0 * spread.rank.parameters
    assert spread.states(0, 8).optimizer == pytest.approx(8.0 * spread.rank.parameters, rel=1e-4)
    for stage in (1, 2):
        assert spread.states(stage, 8).weights == 2.0 * spread.rank.parameters
        assert spread.states(stage, 8).optimizer == whole.states(stage, 8).optimizer


def test_offloaded_states_are_not_part_of_the_total():
    kept, offloaded = (estimator(f"deepspeed={name}").states(3, 2) for name in ("zero3", "zero3_offload"))
    # with the gradients and the update
    assert offloaded.offloaded == kept.total - kept.buffers
    assert offloaded.total == pytest.approx(kept.total - offloaded.offloaded)


def test_graphs_that_the_settings_exclude_need_no_memory():
    excluded = ("training.profile=true", "training.cuda_graphs=false", "deepspeed=zero1")
    stages = [(override, int(override == excluded[2])) for override in excluded]
    assert [estimator(override).has_graphs(stage) for override, stage in stages] == [False] * 3
    assert estimator().has_graphs(0)


def test_several_ranks_copy_gradients_bucket_by_bucket_at_zero_0():
    eager = ("size=360m", "training.cuda_graphs=false")
    memory = estimator(*eager)
    assert memory.states(0, 1).activations == 0
    assert memory.states(0, 8).activations == 4.0 * 10**7
    halved = estimator(*eager, "deepspeed.reduce_bucket_size=5M", "deepspeed.communication_data_type=bf16")
    assert halved.states(0, 8).activations == 4.0 * 5 * 10**6 + 2.0 * memory.whole.parameters

    # after a graph, all gradients are copied while its activations stay reserved
    graphs = estimator("size=360m")
    copied = 4.0 * graphs.whole.parameters
    assert graphs.states(0, 1).activations == 0
    assert graphs.states(0, 8).activations == copied
    assert graphs.estimate(0, 8, 1).activations == memory.estimate(0, 8, 1).activations + copied


def saved_by_autograd(model, tokens, autocast) -> int:
    """Return the bytes of the distinct storages that a real forward pass keeps for the backward pass."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(tokens, tokens)
    del loss
    return sum(saved.values())


@pytest.mark.parametrize("name", PRESETS)
def test_a_trace_counts_what_autograd_saves(name):
    autocast = mechanisms().index(name) % 2 == 0
    config = configuration(f"model={name}", "size.num_layers=3")
    real, meta = (depthlm.build_model(config, device) for device in ("cpu", "meta"))
    real.end_of_text = meta.end_of_text = None if autocast else 0
    saved = saved_by_autograd(real, torch.ones(4, 128, dtype=torch.long), autocast)
    counted = trace(meta, "cpu", 4, 128, torch.bfloat16 if autocast else None)
    assert counted.saved == pytest.approx(saved, rel=0.03)


def test_a_trace_counts_all_that_an_operator_has_allocated_where_it_returns_a_part():
    operators = torch.library.Library("depthlm_test", "FRAGMENT")
    operators.define("part(Tensor x) -> Tensor")
    operators.impl("part", lambda x: x.new_empty(100, x.shape[0])[:1], "Meta")
    with _Ledger([]) as ledger:
        parts = [torch.ops.depthlm_test.part(torch.empty(5, device="meta")) for _ in range(2)]
        assert ledger.live == 4 * len(parts) * 100 * 5


@pytest.mark.parametrize(("backbone", "autocast"), [("qwen3_moe", True), ("kimi_linear", False)])
def test_a_trace_of_experts_assumes_equal_loads(backbone, autocast):
    config = configuration(f"backbone={backbone}", "size.num_layers=3")
    real, meta = (depthlm.build_model(config, device) for device in ("cpu", "meta"))
    tokens = torch.randint(0, 512, (4, 128), generator=torch.Generator().manual_seed(0))
    saved = saved_by_autograd(real, tokens, autocast)
    counted = trace(meta, "cpu", 4, 128, torch.bfloat16 if autocast else None)
    assert counted.saved == pytest.approx(saved, rel=0.05)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_traced_for_a_gpu_and_saves_no_more_than_on_a_cpu(name):
    config = configuration(f"model={name}", "size.num_kv_heads=2")
    on_cpu, on_gpu = (trace(depthlm.build_model(config, "meta"), device, 4, 128) for device in ("cpu", "cuda"))
    # on a GPU, an MLP's product and most streams are computed again
    assert 0.3 * on_cpu.saved < on_gpu.saved < 1.05 * on_cpu.saved


def test_interpolation_between_two_micro_batches_is_accurate():
    config = configuration("model=dca", "size=1.5b", "size.num_layers=4")
    exact, line = MemoryEstimator(config, "cuda"), MemoryEstimator(config, "cuda", line=(4, 32))
    for size in (2, 8, 64):
        assert line.estimate(1, 8, size).total == pytest.approx(exact.estimate(1, 8, size).total, rel=0.05)


RUN = """
import sys
import depthlm
from depthlm.accounting import memory
from depthlm.training import train
memory.CPU_WASTE = {False: (0, 0), True: (0, 0)}
sys.exit(train(depthlm.compose(sys.argv[1:])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "checkpointing"),
    [("vanilla", "fp32", "false"), ("mhc", "fp32", "true"), ("vanilla", "fp32", "selective")],
)
def test_the_estimate_is_close_to_the_memory_of_a_step_on_a_cpu(name, precision, checkpointing, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.txt").write_text(f"document {i} " * 2000)
    overrides = [
        f"model={name}", f"precision={precision}", f"training.activation_checkpointing={checkpointing}", "size=micro",
        "size.num_layers=12", "size.vocab_size=512", "training.batch_size=40", "training.sequence_length=256",
        "training.num_threads=1", "tracker=none", "dry_run=true", "data=local", f"data.source={text}",
        "data.tokenizer=bytes", f"data.path={tmp_path / 'tokens'}", f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    # prepared here, since the memory of preparation is not that of the step
    prepare(depthlm.compose(overrides).data)
    root = Path(depthlm.__file__).parents[1]
    # how much freed memory the C library keeps differs between machines and runs: here it returns large blocks at once
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", RUN, *overrides]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    estimate, peak = (
        next(float(line.split(name)[1].split()[0]) for line in done.stdout.splitlines() if name in line)
        for name in ("memory estimate", "peak memory")
    )
    assert estimate == pytest.approx(peak, rel=0.1)
