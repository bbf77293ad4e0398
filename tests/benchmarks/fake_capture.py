"""Run what a CUDA graph captures of micro-batches, on fake tensors: `python -m tests.benchmarks.fake_capture PRESET ..`

Prints for each preset what makes the host wait, also in a whole step, and whether a later micro-batch launches other
kernels than the one before it. A process of its own, since the fake GPU must be loaded before torch.
"""

import json
import sys
from collections import Counter
from typing import Any

from benchmarks.rehearsal import prepare

SETTINGS = ("size=micro", "kernels=triton", "training.sequence_length=64", "data.document_mask=true")
# two micro-batches
STEP = ("training.batch_size=2", "training.micro_batch_size=1")


def launched(counter: Any) -> list[Counter[str]]:
    """Return the launches: operators of PyTorch, and kernels of Triton with the shapes of their arguments."""
    kernels: Counter[str] = Counter()
    for version, count in counter.triton.items():
        kernels[f"{version.kernel} {version.arguments}"] += count
    return [counter.operators, kernels]


def main() -> None:
    prepare()
    from .fake_passes import passes_of, waits_of_step

    results = {}
    for number, preset in enumerate(sys.argv[1:]):
        # both on every other preset
        other = ["backbone.dropout=0.1"] if number % 2 else ["training.activation_checkpointing=true"]
        first, second, third = passes_of([f"model={preset}", *SETTINGS, *other])
        waits = first.synchronizations + second.synchronizations + third.synchronizations
        of_step = waits_of_step([f"model={preset}", *SETTINGS[:-1], *STEP])
        results[preset] = {
            "waits": dict(waits),
            "changes": launched(second) != launched(third),
            "waits_of_step": [place.rpartition(":")[0] for place in of_step],
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
