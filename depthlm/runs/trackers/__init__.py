"""Services that record a run in addition to metrics.jsonl. A failure of a service never stops a run."""

from depthlm.runs.trackers.start import Trackers, start_trackers
from depthlm.runs.trackers.weights_and_biases import has_key
from depthlm.runs.trackers.weights_and_biases import init as init_wandb

__all__ = ["Trackers", "has_key", "init_wandb", "start_trackers"]
