"""The schema of conf/experiment and conf/budget: points, the paper's numbers, and how runs are shrunk."""

from dataclasses import dataclass
from typing import Any, Optional

from depthlm.fields import key


@dataclass
class Column:
    """A column of the report's table: a number of our runs and its counterpart in the paper."""

    title: str = key("", "heading of the column")
    metric: str = key("", "key of summary.json or evaluation.json, such as validation_loss")
    group: str = key("", "table that contains the column, if the report has several")
    better: str = key("lower", "whether lower or higher numbers are better", choices=("lower", "higher"))
    scale: float = key(1.0, "unit of the paper's number: ours is divided by it, e.g. 1e6 for millions", above=0)
    digits: int = key(3, "decimals shown", minimum=0)
    at: float = key(1.0, "share of the run's steps at which the number is read from metrics.jsonl", above=0, maximum=1)


@dataclass
class Experiment:
    """A table or figure that compares trained models. The rest of its file is the training protocol."""

    name: str = key("", "name of the experiment this run belongs to")
    title: str = key("", "what is compared")
    source: str = key("", "paper, and table or figure in it")
    points: list[Any] = key(
        [],
        "what `-m` trains: one entry per point, `{model: mhc, size: 1.5b}`; lists give every combination. `label` "
        "names the model, `task` what it is compared at (default: its size, data, training, backbone and budget); "
        "`paper` holds the paper's numbers by column (null: not printed there). A value `@label, task` stands for the "
        "run directory of that point",
    )
    flops: Optional[float] = key(
        None,
        "training FLOPs of the largest point, at 6 N per token; a budget shrinks all points in this proportion",
        above=0,
    )
    columns: dict[str, Column] = key({}, "columns of the table; the figure shows the first")
    figure: str = key(
        "none",
        "bars: one per point; scaling: the fit L = a C^b of each series; lines: along x; heatmap: over x and y, one "
        "per series",
        choices=("none", "bars", "scaling", "lines", "heatmap"),
    )
    series: str = key("model", "setting that distinguishes the curves")
    baseline: str = key("vanilla", "value of that setting with which the others are compared")
    fits: dict[str, list[float]] = key({}, "scaling: a and b of L = a C^b in the paper, by series; C in PFLOP/s-days")
    x: str = key("parameters", "x axis: a setting of the points, or a key of summary.json")
    y: Optional[str] = key(None, "heatmap: setting of the y axis")
    assumed: list[str] = key([], "settings that the paper does not give, and the values assumed for them")
    notes: list[str] = key([], "further notes that a comparison needs")


@dataclass
class Budget:
    """How far the runs of an experiment are shrunk. Settings given on the command line stay unchanged."""

    name: str = key("", "name of the budget")
    flops: Optional[float] = key(
        None,
        "maximum training FLOPs of a run, or of an experiment's largest point, at 6 N per token; reduces the tokens",
        above=0,
    )
    max_steps: Optional[int] = key(None, "maximum number of steps of a run", minimum=1)
    batch_tokens: Optional[Any] = key(None, "maximum number of tokens per batch", minimum=1, count=True)
    micro_batch_tokens: Optional[Any] = key(
        None, "maximum number of tokens per forward pass; null: the whole share of a rank", minimum=1, count=True
    )
    sequence_length: Optional[int] = key(None, "maximum number of tokens per sequence", minimum=1)
    width_divisor: int = key(1, "divisor of all widths, and of num_experts down to twice experts_per_token", minimum=1)
    offline: bool = key(
        False,
        "run on any machine: replace the protocol's settings by the standard library as bytes, precision=fp32, "
        "deepspeed=zero0 and one thread",
    )
