"""The command line of train.py before Hydra sees it: help, and every mistake at once."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser

from depthlm.config.compose import compose
from depthlm.config.help import print_help
from depthlm.config.sources import open_names
from depthlm.config.sweep import check_points, is_axis
from depthlm.errors import UserError
from depthlm.launchers import ranks

# what comes with an extra: the override, its module and the extra
PLUGINS = (
    ("hydra/launcher=slurm", "hydra_submitit_launcher", "slurm"),
    ("hydra/sweeper=optuna", "hydra_optuna_sweeper", "tune"),
    ("hydra/sweeper=learning_rate", "hydra_optuna_sweeper", "tune"),
)


def prepare_arguments(arguments: Sequence[str]) -> list[str]:
    """Check a command line; what is left of it for Hydra. Exits 0 after help. Raises UserError with every mistake."""
    # DeepSpeed's launcher adds --local_rank, which Hydra's parser refuses; the environment says the same.
    kept = [argument for argument in arguments if not argument.startswith(("--local_rank=", "--local-rank="))]
    if "--help" in kept or "-h" in kept:
        print_help()
        sys.exit(0)
    # Hydra's own modes (--cfg, --info, ...) look at a configuration without running it.
    parsed, unknown = get_args_parser().parse_known_args(kept)
    if parsed.shell_completion:
        return kept
    if unknown:
        raise UserError(f"{' '.join(unknown)}: no such flag; settings are key=value, and --help lists them")
    if parsed.config_name or parsed.config_path:
        raise UserError(
            "--config-name and --config-path: the configuration is conf/config.yaml; add to it by --config-dir"
        )
    if parsed.resolve and not parsed.cfg:
        raise UserError("--resolve: goes with --cfg job")
    _check(parsed.overrides, parsed.multirun, parsed.config_dir)
    return open_names(kept, settings=parsed.multirun)


def _check(overrides: list[str], multirun: bool, config_dir: str | None) -> None:
    if not multirun:
        compose(overrides, config_dir)
        return
    if ranks().world_size > 1:
        raise UserError("-m under several ranks would run the whole sweep in each of them: start one point a launch")
    for group, plugin, extra in PLUGINS:
        if group in overrides and importlib.util.find_spec(f"hydra_plugins.{plugin}") is None:
            raise UserError(f"{group}: not installed; pip install -e '.[{extra}]' -c constraints.txt")
    # another sweeper makes points of its own, and may keep what it knows there before there is a run
    other = any(text.startswith("hydra/sweeper=") for text in overrides)
    check_points([text for text in overrides if not (other and is_axis(text))], config_dir)
    if other:
        Path("outputs").mkdir(exist_ok=True)
