"""The papers' task suites: the harness's name of each task, and the metric that is the paper's accuracy."""

from dataclasses import dataclass, field
from pathlib import Path

# tasks that come with depthlm
SHIPPED = {file.stem: file for file in Path(__file__).parent.joinpath("shipped").glob("*.yaml")}


@dataclass(frozen=True)
class Suite:
    """Tasks of the harness by their name in evaluation.json, each with its metric. `average` is over all tasks."""

    tasks: dict[str, tuple[str, str]]
    shots: list[int] = field(default_factory=lambda: [0])


SUITES = {
    # Depth-Attention (arXiv 2606.05014), Table 1: "all downstream numbers are accuracies"
    "paper": Suite(
        {
            "lambada": ("lambada_openai", "acc"),
            "piqa": ("piqa", "acc"),
            "winogrande": ("winogrande", "acc"),
            "sciq": ("sciq", "acc"),
            "hellaswag": ("hellaswag", "acc"),
            "arc_easy": ("arc_easy", "acc"),
            "arc_challenge": ("arc_challenge", "acc"),
            "race": ("race", "acc"),
        },
        [0, 5],
    ),
    # MoDA (arXiv 2603.15619), section 4.3; it names no metrics, so these are those of OLMo's own evaluation
    "moda": Suite(
        {
            "piqa": ("piqa", "acc_norm"),
            "hellaswag": ("hellaswag", "acc_norm"),
            "winogrande": ("winogrande", "acc"),
            "openbookqa": ("openbookqa", "acc_norm"),
            "boolq": ("boolq", "acc"),
            "sciq": ("sciq", "acc"),
            "arc_easy": ("arc_easy", "acc"),
            "arc_challenge": ("arc_challenge", "acc_norm"),
            "copa": ("copa", "acc"),
            "mmlu": ("mmlu", "acc"),
        }
    ),
}
