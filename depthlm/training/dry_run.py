"""The dry run: one full-size step, to measure its peak memory and time."""

import time

import torch

from depthlm.config import Config
from depthlm.data import Batches
from depthlm.training.engine import Engine
from depthlm.training.loop import train_step
from depthlm.training.monitoring.display import show_table
from depthlm.training.monitoring.metrics import peak_memory_gib
from depthlm.training.plan import Plan


def dry_run(config: Config, plan: Plan, batches: Batches, engine: Engine, device: torch.device) -> None:
    """Take two steps on the global batch and print their peak memory and time; no run directory is written."""
    batch = batches[0].to(device)
    seconds = []
    # the second step is timed: the first one allocates optimizer states and compiles
    for _ in range(2):
        started = time.perf_counter()
        nll = train_step(engine, batch, plan, config.training.z_loss)
        loss = nll.item() / plan.tokens_per_step
        seconds.append(time.perf_counter() - started)
    rows = {
        "peak memory": f"{peak_memory_gib(device):.2f} GiB",
        "step": f"{seconds[1]:.2f} s ({seconds[0]:.2f} s the first), {plan.tokens_per_step / seconds[1]:,.0f} tokens/s",
        "whole run": f"about {seconds[1] * plan.max_steps / 3600:.2f} hours of steps",
        "loss": f"{loss:.4f} after one step",
    }
    show_table("One full-size step", rows, torch.distributed.get_rank())
