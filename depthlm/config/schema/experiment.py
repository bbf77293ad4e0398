"""What a file of conf/experiment and one of conf/budget say: points, the paper's numbers, and how runs are shrunk."""

from dataclasses import dataclass
from typing import Any, Optional

from depthlm.fields import key


@dataclass
class Column:
    """A column of the report's table: a number of ours, and what it is in the paper."""

    title: str = key("", "its head")
    metric: str = key("", "a number of summary.json or of evaluation.json, as validation_loss")
    group: str = key("", "the table it stands in, where the report has several")
    better: str = key("lower", "which numbers are better", choices=("lower", "higher"))
    scale: float = key(1.0, "unit of the paper's number: ours is divided by it, as 1e6 for millions", above=0)
    digits: int = key(3, "decimals shown", minimum=0)
    at: float = key(1.0, "share of the run's steps after which it is taken, from metrics.jsonl", above=0, maximum=1)


@dataclass
class Experiment:
    """A table or figure that compares trained models. The protocol is the rest of its file."""

    name: str = key("", "the experiment of this run")
    title: str = key("", "what is compared")
    source: str = key("", "the paper, and its table or figure")
    points: list[Any] = key(
        [],
        "what `-m` trains: one line a point, `{model: mhc, size: 1.5b}`; lists are multiplied. `label` names it, "
        "`paper` has the paper's numbers by column (null: none printed), and the value `@label` is the run directory "
        "of that point",
    )
    flops: Optional[float] = key(
        None,
        "training FLOPs of its largest point, by 6 N a token: a budget cuts all points in this proportion",
        above=0,
    )
    columns: dict[str, Column] = key({}, "columns of the table; the first is what the figure draws")
    figure: str = key(
        "none",
        "bars of the points; scaling: L = a C^b for each series; lines along x; heatmap over x and y, one a series",
        choices=("none", "bars", "scaling", "lines", "heatmap"),
    )
    series: str = key("model", "the setting that tells curves apart")
    baseline: str = key("vanilla", "the value of it that the others are compared with")
    fits: dict[str, list[float]] = key({}, "scaling: the paper's a and b of L = a C^b by series, C in PFLOP/s-days")
    x: str = key("parameters", "along what: a setting of the points, or a number of summary.json")
    y: Optional[str] = key(None, "heatmap: the second setting")
    assumed: list[str] = key([], "settings that the paper leaves out, and what was taken for them")
    notes: list[str] = key([], "what else a reader must know to compare")


@dataclass
class Budget:
    """How far an experiment's runs are shrunk. What the command line sets itself stays."""

    name: str = key("", "name of the budget")
    flops: Optional[float] = key(
        None,
        "training FLOPs of a run, and of an experiment's largest, at most, by 6 N a token: tokens are cut",
        above=0,
    )
    max_steps: Optional[int] = key(None, "steps of a run at most", minimum=1)
    batch_tokens: Optional[Any] = key(None, "tokens of a batch at most", minimum=1, count=True)
    micro_batch_tokens: Optional[Any] = key(
        None, "tokens of one forward pass at most; null: the whole share of a rank", minimum=1, count=True
    )
    sequence_length: Optional[int] = key(None, "tokens of a sequence at most", minimum=1)
    width_divisor: int = key(1, "hidden_size, intermediate_size and head_size are divided by this", minimum=1)
    offline: bool = key(
        False,
        "any machine: the standard library as bytes, precision=fp32, deepspeed=zero0 and one thread, in place of the "
        "protocol's",
    )
