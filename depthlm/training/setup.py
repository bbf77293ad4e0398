"""What a run and a dry run have in common: their process, their data, and the model in its engine."""

import dataclasses
import gc
import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from depthlm.accounting.cost import cache_bytes_per_token, count_parameters, flops_per_token
from depthlm.accounting.memory import Memory
from depthlm.build import build_model, draw_weights
from depthlm.config import Config, prepare_command
from depthlm.config.keys import flatten
from depthlm.data import Batches, Corpus, check_prepared, open_corpus, prepare
from depthlm.distributed import launchers
from depthlm.distributed.launchers import Ranks
from depthlm.distributed.process_group import (
    gather,
    leave_distributed,
    on_rank_0,
    process_groups,
    set_timeout,
    start_distributed,
)
from depthlm.distributed.signals import end_on_signal
from depthlm.distributed.watchdog import Activity, watch_ranks
from depthlm.errors import UserError
from depthlm.locations import PACKAGE
from depthlm.machine import environment
from depthlm.machine.environment import versions
from depthlm.machine.memory import available_memory
from depthlm.model import compile_sublayers
from depthlm.model.decoder import SELECTIVE
from depthlm.ops.backend import missing
from depthlm.training.checkpoint.init_from import import_weights
from depthlm.training.engine import Engine, build_engine, draw_shards, draw_spread, forget_group, undo_sharding
from depthlm.training.memory_check import check_memory
from depthlm.training.monitoring.describe import Cost, derive_values
from depthlm.training.monitoring.display import show_table, start_logging
from depthlm.training.plan import Plan, make_plan

log = logging.getLogger(__name__)
MAX_NAMED, MISSING = 8, "missing"
# the packages that compute
PACKAGES = ("torch", "triton", "deepspeed")


@dataclass(frozen=True)
class Setup:
    """A run on this rank before its model is built.

    memory: the estimate; None if the decoder or the optimizer cannot be traced.
    """

    config: Config
    ranks: Ranks
    device: torch.device
    activity: Activity
    memory: Memory | None
    plan: Plan
    corpus: Corpus
    batches: Batches


def start_process(config: Config) -> Ranks:
    """Set this process's threads, numerics, GPU allocator and logging, and free an earlier run. Returns the ranks."""
    ranks = launchers.ranks()
    threads = environment.threads(config.training.num_threads, ranks.launcher, ranks.local_world_size)
    torch.set_num_threads(threads.number)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cuda.matmul.allow_tf32 = config.precision.tf32
    environment.prevent_fragmentation()
    free_earlier_run()
    start_logging(ranks.rank)
    logging.getLogger("depthlm").info("%s", threads)
    return ranks


def free_earlier_run() -> None:
    """Free the memory of an earlier run in this process (a sweep), and reset the GPU's peak memory."""
    undo_sharding()
    if "torch._dynamo" in sys.modules:
        # the compilations of earlier runs count toward a limit, beyond which nothing is compiled
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def collective_timeout(config: Config) -> timedelta:
    """Return the timeout of collective operations: the watchdog's act first, since it can name the rank to blame."""
    return timedelta(minutes=2 * config.training.stall_timeout, seconds=config.training.rank_timeout)


@contextmanager
def process_group(config: Config, ranks: Ranks) -> Iterator[tuple[torch.device, Activity]]:
    """Join the process group and watch its ranks while the block runs. Yields this rank's device and its activity.

    A group that existed before stays, and the variables of the launcher are restored. Raises UserError if the ranks
    have different configurations or code.
    """
    training = config.training
    with launchers.restored_variables():
        is_own = not torch.distributed.is_initialized()
        device = start_distributed(ranks, collective_timeout(config), device_choice=config.device)
        try:
            with (
                watch_ranks(ranks, training.rank_timeout, training.stall_timeout) as activity,
                end_on_signal(activity.report),
            ):
                check_same_run(config)
                yield device, activity
                if is_own:
                    leave_distributed()
                    is_own = False
        except UserError:
            if is_own:
                leave_distributed(together=False)
                is_own = False
            raise
        finally:
            # of several ranks, the others may wait in a collective operation
            if is_own and ranks.world_size == 1:
                leave_distributed()
            if not torch.distributed.is_initialized():
                forget_group()


def prepare_run(config: Config, ranks: Ranks, device: torch.device, activity: Activity) -> Setup:
    """Check that the run fits in memory, prepare its token files, and plan it; collective.

    Raises UserError if the run cannot start.
    """
    available = min(gather(available_memory(device, ranks.local_world_size)))
    memory = on_rank_0(lambda: check_memory(config, ranks, device, available))
    on_rank_0(lambda: check_prepared(config.data, partial(prepare_command, config)))
    activity.mark("preparing the data", 0, limited=False)
    on_rank_0(lambda: prepare(config.data))
    activity.mark("starting", 0, limited=False)
    corpus = open_corpus(config.data)
    check_same_corpus(corpus)
    plan = make_plan(config, ranks, corpus.windows(config.training.sequence_length))
    batches = Batches(
        corpus.train,
        weights=corpus.weights,
        sequence_length=plan.sequence_length,
        batch_size=plan.batch_size,
        seed=config.seed if config.data.shuffle_seed is None else config.data.shuffle_seed,
        micro_batch=plan.micro_batch_size,
        max_repetitions=config.data.max_repetitions,
        rank=ranks.rank // plan.stages,
        ranks=plan.replicas,
    )
    return Setup(config, ranks, device, activity, memory, plan, corpus, batches)


def build(setup: Setup, import_initial: bool) -> tuple[Engine, Cost]:
    """Build the model in its engine at step 0, and print the derived values; collective.

    import_initial: whether to read the weights of init_from, if it is set.
    """
    config, plan, corpus, earlier = setup.config, setup.plan, setup.corpus, process_groups()
    # the accounting needs shapes, which a sharded model does not have
    model = build_model(config, "meta")
    model.checkpoint_activations(config.training.activation_checkpointing)
    model.mask_documents(config.data.document_mask, corpus.tokenizer.end_of_text)
    end_of_text = model.end_of_text
    attended = plan.sequence_length if end_of_text is None else setup.batches.document_length(end_of_text)
    flops = flops_per_token(model, attended).training
    cost = Cost(count_parameters(model)["total"], flops, cache_bytes_per_token(model))
    if compiles(config, setup.device):
        compile_sublayers(model)
    rows = derive_values(config, plan, corpus, setup.batches, model, cost.flops_per_token, setup.memory)
    if plan.stages > 1:
        from depthlm.training.pipeline.engine import PipelineEngine, draw_stage

        layout = draw_stage(config, model, setup.device)
    elif config.deepspeed.stage == 3:
        draw_shards(config, plan, model)
    elif config.deepspeed.experts > 1:
        draw_spread(config, model, setup.device)
    else:
        draw_weights(config, model, setup.device)
    if config.init_from is not None and import_initial:
        import_weights(config, model)
    show_table("depthlm", rows, setup.ranks.rank)
    if plan.stages > 1:
        engine: Engine = PipelineEngine(config, plan, model, layout, setup.device)
    else:
        engine = build_engine(config, plan, model)
    # those of a pipeline and of DeepSpeed have torch's default
    set_timeout(process_groups() - earlier, collective_timeout(config))
    return engine, cost


def compiles(config: Config, device: torch.device) -> bool:
    """Return whether torch.compile compiles the sublayers."""
    if config.training.compile != "auto":
        return config.training.compile is True
    # what is stored in a compiled sublayer is not decided operator by operator
    if device.type != "cuda" or config.deepspeed.stage == 3 or config.training.activation_checkpointing == SELECTIVE:
        return False
    if reason := missing(device.type):
        log.warning("training.compile=auto: the sublayers are not compiled: %s", reason)
    return reason is None


def check_same_run(config: Config) -> None:
    """Raise UserError on all ranks if one has another configuration or other code than rank 0; collective."""
    if torch.distributed.get_world_size() == 1:
        return
    # a node may have its own copy of the token files, which are compared by their digests
    settings = {
        name: value
        for name, value in flatten(dataclasses.asdict(config)).items()
        if not (name.removeprefix("differences.").startswith("data.") and name.endswith("path"))
    }
    packages = {f"the version of {name}": version for name, version in versions().items() if name in PACKAGES}
    _check_same({**settings, "the code of depthlm": digest(PACKAGE.rglob("*.py")), **packages})


def check_same_corpus(corpus: Corpus) -> None:
    """Raise UserError on all ranks if one has other token files than rank 0, by their manifests; collective."""
    _check_same(
        {
            f"the digest of the token files of {name}": f"{manifest.digest()}, tokenizer {manifest.tokenizer}"
            for name, manifest in corpus.manifests.items()
        }
    )


def digest(files: Iterable[Path]) -> str:
    """Return the SHA-256 of files."""
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in sorted(files))).hexdigest()


def _check_same(values: Mapping[str, Any]) -> None:
    """Raise UserError with the differences if a rank has other values than rank 0."""
    if len(set(gather(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()))) == 1:
        return
    (_, expected), *others = gather((socket.gethostname(), dict(values)))
    lines = [
        f"  - rank {rank} on {host}: {name} is {other.get(name, MISSING)}, and on rank 0 {expected.get(name, MISSING)}"
        for rank, (host, other) in enumerate(others, 1)
        for name in {**expected, **other}
        if other.get(name, MISSING) != expected.get(name, MISSING)
    ]
    more = [f"  - and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
    raise UserError(
        "\n".join(["the ranks would train different runs:", *lines[:MAX_NAMED], *more])
        + "\nStart all ranks with the same command, code and token files"
    )
