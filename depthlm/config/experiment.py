"""The keys of conf/experiment and conf/budget: the points, the paper's numbers, and how far the runs are shrunk."""

from dataclasses import dataclass
from typing import Any, Literal

from depthlm.counts import Count
from depthlm.fields import key


@dataclass(frozen=True)
class Column:
    """A column of the report's table: a number of our runs and its counterpart in the paper."""

    title: str = key("", "heading of the column")
    metric: str = key(
        "",
        "key of summary.json or evaluation.json, such as validation_loss; training_perplexity, of the last 1% of the "
        "steps; time_to_baseline, the training time after which the validation loss is first at most the baseline's "
        "last one, as a share of the baseline's training time; or validation/average_perplexity, the mean of the "
        "perplexities of single validation sets that other columns have",
    )
    group: str = key("", "table that contains the column, if the report has several")
    better: Literal["lower", "higher"] = key("lower", "whether lower or higher numbers are better")
    scale: float = key(1.0, "unit of the paper's number: ours is divided by it, e.g. 1e6 for millions", above=0)
    digits: int = key(3, "decimals shown", minimum=0)
    at: float = key(1.0, "share of the run's steps at which the number is read from metrics.jsonl", above=0, maximum=1)


# the column of an experiment without columns
VALIDATION_LOSS = Column(title="validation loss", metric="validation_loss", digits=4)


@dataclass(frozen=True)
class Experiment:
    """A table or figure that compares trained models. The rest of its file is the training protocol."""

    name: str = key("", "name of the experiment this run belongs to")
    title: str = key("", "what is compared")
    source: str = key("", "paper, and table or figure in it")
    points: list[Any] = key(
        [],
        "what `-m` trains: one entry per point, `{model: mhc, size: 1.5b}`; lists give every combination. `label` "
        "names the model, `task` what it is compared at (default: its size, data, training, backbone and budget); "
        "`paper` holds the paper's numbers by column: a number, `[number, spread]`, or null. A value `@label, "
        "task` stands for the run directory of that point",
    )
    best_over: str | None = key(
        None,
        "setting, such as optimizer.lr, whose values in the points are a grid: for each group of points that differ in "
        "nothing else but the seed, the best value by the first column is chosen, and reported",
    )
    selection_seeds: list[int] = key(
        [11, 12], "seeds of the runs that choose; the seeds of the points are those that report"
    )
    widen: int = key(
        3, "the most values that the grid of a setting gains, for a group whose best value is at its edge", minimum=0
    )
    flops: float | None = key(
        None,
        "training FLOPs of the largest point, at 6 N per token; a budget shrinks all points in this proportion",
        above=0,
    )
    columns: dict[str, Column] = key({}, "columns of the table; the figure shows the first")
    figure: Literal["none", "bars", "scaling", "lines"] = key(
        "none",
        "bars: one per point; scaling: the fit L = a C^b of each series; lines: along x",
    )
    curves: list[Literal["steps", "tokens", "time", "depth"]] = key(
        [],
        "x axes over which the report draws the validation perplexity of all points, time being training time; depth: "
        "the size of each sublayer's output and gradient at the end, which needs training.log_blocks_every",
    )
    pictures: list[str] = key([], "pictures of `python -m depthlm inspect` that the report shows, such as dca_b")
    series: str = key("model", "setting that distinguishes the curves")
    baseline: str = key("vanilla", "value of that setting with which the others are compared")
    fits: dict[str, list[float]] = key({}, "scaling: a and b of L = a C^b in the paper, by series; C in PFLOP/s-days")
    x: str = key("parameters", "x axis: a setting of the points, or a key of summary.json")
    assumed: list[str] = key([], "settings that the paper does not give, and the values assumed for them")
    notes: list[str] = key([], "further notes that a comparison needs")


@dataclass(frozen=True)
class Budget:
    """How far the runs of an experiment are shrunk. Settings given on the command line stay unchanged."""

    name: str = key("", "name of the budget")
    flops: float | None = key(
        None,
        "maximum training FLOPs of a run, or of an experiment's largest point, at 6 N per token; reduces the tokens",
        above=0,
    )
    max_steps: Count | None = key(None, "maximum number of steps of a run", minimum=1)
    batch_tokens: Count | None = key(None, "maximum number of tokens per batch", minimum=1)
    micro_batch_tokens: Count | None = key(
        None, "maximum number of tokens per forward pass; null: the whole share of a rank", minimum=1
    )
    sequence_length: int | None = key(None, "maximum number of tokens per sequence", minimum=1)
    width_divisor: int = key(1, "divisor of all widths, and of num_experts down to twice experts_per_token", minimum=1)
    offline: bool = key(
        False,
        "run on any machine: replace the protocol's settings by the standard library as bytes, precision=fp32, "
        "deepspeed=zero0 and one thread",
    )
