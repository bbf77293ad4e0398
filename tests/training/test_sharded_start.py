"""At ZeRO 3 the initial weights are those of every stage, and no rank ever holds the whole model."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import depthlm
from depthlm.distributed.launchers import ranks
from depthlm.model import Decoder
from depthlm.model.parameters import optimizer_groups
from depthlm.runs.records import read_metrics
from depthlm.training.checkpoint.init_from import copy_weights
from depthlm.training.engine import build_engine, draw_shards
from depthlm.training.plan import make_plan

from .run_files import assert_same

SHAPE = ("size.num_layers=6", "training.micro_batch_size=2", "deepspeed=zero3")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the live storages that operators have returned, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.live = 0, 0
        self.known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def release(_: Any) -> None:
            self.live -= size
            del self.known[key]

        self.known[key] = weakref.ref(storage, release)
        self.live += size
        self.peak = max(self.peak, self.live)


def start(overrides: list[str], gathered: Path, source: Path) -> tuple[int, list[Any]]:
    """Return the peak of live bytes while the weights are drawn and imported, and the optimizer's groups.

    gathered: the file to which rank 0 writes the weights. source: a file of weights to import.
    """
    config = depthlm.compose(overrides)
    plan, model, live = make_plan(config, ranks()), depthlm.build_model(config, "meta"), LiveBytes()
    # the tensors are views of the file, and occupy no memory of their own
    given = load_file(source)
    with live:
        draw_shards(config, plan, model)
        copy_weights(given, model)
    groups = groups_of(model, config.optimizer.weight_decay)
    engine = build_engine(config, plan, model)
    if weights := engine.weights():
        save_file(weights, gathered)
    engine.destroy()
    return live.peak, groups


def groups_of(model: Decoder, weight_decay: float) -> list[Any]:
    return [{**group, "params": len(group["params"])} for group in optimizer_groups(model, weight_decay)]


def test_two_ranks_hold_their_shards_and_one_whole_weight(two_ranks, small_run, tmp_path):
    overrides = small_run(*SHAPE, "precision=bf16", "model=dca")
    config = depthlm.compose(overrides)
    gathered, source = tmp_path / "gathered.safetensors", tmp_path / "source.safetensors"
    # as at ZeRO 0
    model = depthlm.build_model(config)
    groups = groups_of(model, config.optimizer.weight_decay)
    # the other weights are drawn
    imported = {name: tensor + 1 for name, tensor in model.state_dict().items() if "mlp" in name}
    save_file(imported, source)
    copy_weights(imported, model)
    expected = model.to(torch.bfloat16).state_dict()
    peaks, sharded_groups = zip(*two_ranks(start, overrides, gathered, source), strict=True)
    assert sharded_groups == (groups, groups)
    assert_same(load_file(gathered), expected)
    whole = sum(tensor.nbytes for tensor in expected.values())
    # the largest weight: drawn in fp32 and then cast, or gathered and then broadcast
    largest = max(4 * tensor.numel() for tensor in expected.values())
    assert max(peaks) <= whole / 2 + 2 * largest < whole


def test_a_decoder_with_a_tied_head_generates_the_sample_after_training(train_run):
    run = train_run("backbone.tie_embeddings=true", "training.sample=depth", "training.max_steps=1", "deepspeed=zero3")
    assert "a sample:\ndepth" in (run / "train.log").read_text()


def test_selective_recomputation_of_layers_with_biases_has_the_gradients_of_none(train_run):
    shape = ("backbone=lm1b", "backbone.bias_init_std=0.5", "training.max_steps=2", "deepspeed=zero3")
    plain, selective = (
        [
            row["grad_norm"]
            for row in read_metrics(
                train_run(*shape, f"training.activation_checkpointing={how}", name=how) / "metrics.jsonl"
            )
        ]
        for how in ("false", "selective")
    )
    assert selective == pytest.approx(plain, rel=1e-5)
