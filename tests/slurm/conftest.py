"""Fixtures: a SLURM cluster of two nodes if SLURM is installed, and a sweep of short runs."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "cluster.sh"

EXPERIMENT = """
# @package _global_
experiment:
  title: four short runs
  points:
    - {model: [vanilla, denseformer], optimizer.lr: [0.001, 0.002]}
  columns:
    loss: {title: loss, metric: validation_loss}
"""


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, str]]:
    """The environment variables with which SLURM commands use a local cluster of two nodes."""
    missing = [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name, path="/usr/sbin") is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: apt-get install -y --no-install-recommends slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("only root can start a SLURM cluster")
    started = subprocess.run([SCRIPT, "start"], capture_output=True, text=True)
    if started.returncode:
        # some machines do not allow these daemons
        pytest.skip(f"SLURM cannot be started here: {started.stderr.strip()}")
    # the node names are not real host names, so the master address must be given
    yield {"SLURM_CONF": started.stdout.strip().partition("=")[2], "MASTER_ADDR": "127.0.0.1"}
    subprocess.run([SCRIPT, "stop"], check=True)


@pytest.fixture
def four_points(small_run: Callable[..., list[str]], tmp_path: Path) -> list[str]:
    """The overrides of four short runs, the product of two axes, in an experiment written for the test."""
    folder = tmp_path / "conf/experiment/mine"
    folder.mkdir(parents=True)
    (folder / "four.yaml").write_text(EXPERIMENT.lstrip())
    place = f"output_dir={tmp_path}/runs/${{model.name}}-${{optimizer.lr}}"
    kept = [text for text in small_run() if not text.startswith("output_dir=")]
    return ["--config-dir", str(tmp_path / "conf"), "experiment=mine/four", *kept, place]
