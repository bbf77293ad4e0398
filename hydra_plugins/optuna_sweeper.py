"""A Hydra sweeper that tunes settings with Optuna. Hydra searches for plugins only in a folder of this name."""

import importlib.util
import math
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig

from depthlm.commands.exits import exit_on_mistake
from depthlm.config import ConfigError
from depthlm.config.arguments import read_arguments
from depthlm.config.compose import compose_unchecked
from depthlm.config.hydra_context import config_dir_of, open_names
from depthlm.config.keys import override_text
from depthlm.config.names import by_name, normal_value
from depthlm.counts import format_count
from depthlm.errors import UserError
from depthlm.fields import key
from depthlm.locations import install_command
from depthlm.runs.records import read_run
from depthlm.sweeps.points import plain_points


@dataclass(frozen=True)
class Options:
    """The options of the sweeper besides its sampler and params; conf/hydra/sweeper/optuna.yaml documents them."""

    storage: str | None
    study_name: str | None
    direction: Literal["minimize", "maximize"]
    n_trials: int = key(minimum=1)
    n_jobs: int = key(minimum=1)
    max_failure_rate: float = key(minimum=0, maximum=1)


class OptunaSweeper(Sweeper):
    """A sweeper that gives the trials of a study to any launcher.

    When a study is opened again, its interrupted trials come first, and their runs resume.
    """

    def __init__(self, sampler: dict[str, Any], params: dict[str, Any] | None, **options: Any) -> None:
        self.sampler, self.params, self.options = sampler, params or {}, options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Create the launcher that the command line selects."""
        self.config_dir = config_dir_of(config.hydra)
        self.parser = OverridesParser.create(config_loader=hydra_context.config_loader)
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Train the trials and print the best one. Exits with code 1 if too many of them fail, or none has a loss."""
        exit_on_mistake("train.py", lambda: self._tune(arguments))

    def _tune(self, arguments: Sequence[str]) -> None:
        if importlib.util.find_spec("optuna") is None:
            raise UserError(f"hydra/sweeper=optuna: not installed; {install_command('tune')}")
        texts = [f"{name}={override_text(value)}" for name, value in self.options.items()]
        options = read_arguments(Options, texts, prefix="hydra.sweeper.")
        params = open_names([f"{name}={text}" for name, text in self.params.items()], settings=True)
        fixed, axes = self._read_axes([*params, *arguments])
        if normal_value("dry_run", by_name(fixed).get("dry_run", "false")) == "true":
            raise UserError("dry_run=true: a dry run has no loss to tune by; leave out -m and hydra/sweeper=")
        study = self._open_study(
            options, f"{', '.join(axes)} of {compose_unchecked(fixed, self.config_dir).output_dir}"
        )
        from optuna.trial import TrialState

        interrupted = [trial for trial in study.trials if not trial.state.is_finished() and {*trial.params} == {*axes}]
        for first in range(0, options.n_trials, options.n_jobs):
            batch = range(first, min(first + options.n_jobs, options.n_trials))
            try:
                trials = [interrupted.pop(0) if interrupted else study.ask(axes) for _ in batch]
            except ValueError as error:
                raise UserError(f"study {study.study_name}: {error}; give another hydra.sweeper.study_name=") from None
            points = [(*open_names(fixed), *_settings(trial.params)) for trial in trials]
            losses = self._train(dict.fromkeys(points), first)
            failed = 0
            for trial, point in zip(trials, points, strict=True):
                loss = losses[point]
                # a sampler keeps away from pruned trials, and ignores failed ones
                unmeasured = TrialState.PRUNED if self._diverged(point) else TrialState.FAIL
                state = unmeasured if loss is None else TrialState.COMPLETE
                study.tell(trial.number, loss, state)
                failed += state == TrialState.FAIL
            if failed > options.max_failure_rate * len(points):
                sys.exit(f"train.py: {failed} of {len(points)} trials failed, beyond hydra.sweeper.max_failure_rate=")
        if not study.get_trials(states=[TrialState.COMPLETE]):
            sys.exit("train.py: no trial has a finite loss")
        best = study.best_trial
        trials_text, settings = format_count(len(study.trials), "trial"), " ".join(_settings(best.params))
        print(f"{trials_text}; the best loss is {best.value:.4f} with {settings}")

    def _read_axes(self, overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Return the overrides that all trials share, and the distribution of each setting that is tuned.

        Raises UserError for values that are not allowed.
        """
        # the last override of a key wins, so the command line replaces what a file tunes
        last = {text.lstrip("+").partition("=")[0]: text for text in overrides}
        try:
            parsed = self.parser.parse_overrides(list(last.values()))
            axes = {axis.get_key_element(): _distribution(axis) for axis in parsed if axis.is_sweep_override()}
        except (HydraException, ValueError) as error:
            raise UserError(f"{' '.join(last.values())}: {error}") from None
        if not axes:
            raise UserError("nothing to tune; add an interval, as in 'optimizer.lr=tag(log,interval(3e-4,3e-2))'")
        shared = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
        fixed = self._find_point(shared, axes)
        for name, axis in axes.items():
            values = list(axis.choices) if hasattr(axis, "choices") else [axis.low, axis.high]
            configs = [compose_unchecked([*fixed, f"{name}={value}"], self.config_dir) for value in values]
            if len(values) > 1 and len({config.output_dir for config in configs}) == 1:
                raise UserError(
                    f"output_dir={configs[0].output_dir}: all trials would write there; interpolate what is tuned, "
                    f"as in name='trial-${{{name}}}'"
                )
        return fixed, axes

    def _find_point(self, shared: Sequence[str], axes: Collection[str]) -> list[str]:
        """Return the overrides of the one point that is tuned, without the settings that are. Raises UserError."""
        points = plain_points(shared, self.config_dir)
        others = ([text for text in point if not by_name([text]).keys() & axes] for point in points)
        alike = {tuple(texts): texts for texts in others}
        if len(alike) == 1:
            return next(iter(alike.values()))
        example = " ".join(text for text in next(iter(alike), ()) if text not in shared)
        raise UserError(f"{len(alike)} points; tune one, as in {example}")

    def _open_study(self, options: Options, default_name: str) -> Any:
        """Create a study, or open the one of the same name in the storage. Raises UserError."""
        import optuna
        from sqlalchemy.exc import SQLAlchemyError

        name, seed = options.study_name or default_name, self.sampler.get("seed")
        try:
            study = optuna.create_study(
                storage=options.storage, study_name=name, direction=options.direction, load_if_exists=True
            )
            # with its first seed, a study that is opened again would repeat its first trials
            seeds = {} if seed is None else {"seed": seed + len(study.trials)}
            study.sampler = instantiate(self.sampler | seeds)
        except (HydraException, RuntimeError, SQLAlchemyError) as error:
            raise UserError(f"hydra.sweeper: study {name} in {options.storage}: {error}") from None
        return study

    def _train(self, losses: dict[tuple[str, ...], float | None], first: int) -> dict[tuple[str, ...], float | None]:
        """Return the validation loss of each point that has one. A point that diverged is not repeated."""
        assert self.launcher is not None
        new = [point for point in losses if not self._diverged(point)]
        for point, job in zip(new, self.launcher.launch(new, initial_job_idx=first), strict=True):
            if job.status == JobStatus.COMPLETED and job.return_value != math.inf:
                losses[point] = job.return_value
        return losses

    def _diverged(self, point: Sequence[str]) -> bool:
        # training refuses a point with a mistake, and prints it
        with suppress(ConfigError):
            return read_run(str(compose_unchecked(point, self.config_dir).output_dir)).diverged
        return False


def _distribution(axis: Override) -> Any:
    """Return Optuna's distribution of an interval, a range or a list of values. Raises ValueError for an empty one."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep = axis.value()
    if isinstance(sweep, IntervalSweep):
        # an interval has whole numbers only as int(interval(1,8))
        number = IntDistribution if isinstance(sweep.start, int) else FloatDistribution
        return number(sweep.start, sweep.end, log="log" in sweep.tags)
    values: list[Any] = list(axis.sweep_iterator(transformer=Transformer.encode))
    if not isinstance(sweep, RangeSweep) or sweep.shuffle:
        return CategoricalDistribution(values)
    number = IntDistribution if all(isinstance(value, int) for value in values) else FloatDistribution
    return number(min(values), max(values), step=abs(sweep.step))


def _settings(params: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in params.items()]
