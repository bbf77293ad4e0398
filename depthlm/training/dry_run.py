"""The dry run: measures the peak memory and the time of a full-size step."""

import time

import torch

from depthlm.config import Config
from depthlm.distributed.collectives import on_rank_0
from depthlm.runs.directory import check_run_directory
from depthlm.training.checkpoint.token_ids import check_token_ids
from depthlm.training.monitoring.display import show_table
from depthlm.training.monitoring.metrics import peak_memory_gib
from depthlm.training.setup import build, prepare_run, process_group, start_process
from depthlm.training.step import train_step


def dry_run(config: Config) -> None:
    """Check a validated configuration, take two steps on the global batch, and print their peak memory and time.

    No run directory is written. Raises UserError if the run could not start.
    """
    ranks = start_process(config)
    with process_group(config, ranks) as (device, activity):
        on_rank_0(lambda: check_run_directory(config))
        setup = prepare_run(config, ranks, device, activity)
        on_rank_0(lambda: check_token_ids(config, setup.corpus.tokenizer))
        engine, _ = build(setup, import_initial=True)
        plan, batch = setup.plan, setup.batches[0].to(device)
        seconds = []
        # the second step is timed: the first one allocates optimizer states and compiles
        for _ in range(2):
            started = time.perf_counter()
            nll = train_step(engine, batch, plan, config.training.z_loss)
            loss = nll.item() / plan.tokens_per_step
            seconds.append(time.perf_counter() - started)
        rows = {
            "peak memory": f"{peak_memory_gib(device):.2f} GiB",
            "step": f"{seconds[1]:.2f} s ({seconds[0]:.2f} s the first), "
            f"{plan.tokens_per_step / seconds[1]:,.0f} tokens/s",
            "whole run": f"about {seconds[1] * plan.max_steps / 3600:.2f} hours of steps",
            "loss": f"{loss:.4f} after one step",
        }
        show_table("One full-size step", rows, torch.distributed.get_rank())
