"""Start the configured services of a run, and pass everything on to each of them."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from depthlm.config.schema import Tracker as TrackerConfig
from depthlm.run_directory import RunDirectory
from depthlm.runs.trackers import trackio_service, weights_and_biases
from depthlm.runs.trackers.service import Queued, started
from depthlm.runs.trackers.tensorboard import TensorBoard


class Trackers:
    """The services of a run, if any. id: of its W&B run, which a later process continues."""

    def __init__(self, services: list[Queued], wandb_id: str | None = None) -> None:
        self.services = services
        self.id = next((one.service.id for one in services if one.service.id is not None), wandb_id)

    def write(self, row: dict[str, Any]) -> None:
        """Record the metrics of a step, without blocking."""
        for service in self.services:
            service.write(row)

    def alert(self, title: str, text: str, step: int) -> None:
        """Notify the user of an event at a step, without blocking."""
        for service in self.services:
            service.alert(title, text, step)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Finish at the end of this process, with the summary if the run is complete."""
        for service in self.services:
            service.close(summary)


def start_trackers(
    config: TrackerConfig,
    directory: Path,
    settings: dict[str, Any],
    wandb_id: str | None,
    *,
    resumed_at: int | None = None,
) -> Trackers:
    """Start or continue the services of the run in a directory. One that fails is logged and not used.

    settings: the whole configuration, as nested dictionaries. resumed_at: the step after which this process trains;
    0: it starts the run; None: it does not train.
    """
    run, services = RunDirectory(directory), []
    if config.wandb and os.environ.get("WANDB_MODE") != "disabled":
        start = partial(weights_and_biases.start, config, directory, settings, wandb_id)
        services.append(started("W&B", start, weights_and_biases.give_up))
    if config.tensorboard:
        start_writer = partial(TensorBoard, run.tensorboard, settings, resumed_at)
        services.append(started("TensorBoard", start_writer, lambda: None))
    if config.trackio:
        start_trackio = partial(trackio_service.Trackio, config, directory, settings, resumed_at)
        services.append(started("Trackio", start_trackio, lambda: None))
    return Trackers([service for service in services if service is not None], wandb_id)
