"""The losses of a validation, as a record and as keys of a row of metrics.jsonl, summary.json or evaluation.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ValidationLosses:
    """The mean loss of each validation set by its name, in nats per token; None if it is not finite.

    In a row, a set has the keys `validation/<set>/loss` and `validation/<set>/perplexity`.
    """

    by_set: dict[str, float | None]

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "ValidationLosses":
        """Read the losses of a row; it may have none. A value that is not a finite number counts as None."""
        names = (key.removeprefix("validation/").removesuffix("/loss") for key in row if _is_loss(key))
        return cls({name: finite(row[loss_key(name)]) for name in names})

    def __bool__(self) -> bool:
        return bool(self.by_set)

    @property
    def mean(self) -> float | None:
        """The mean over all sets; None if there is no set, or if one of them has no finite loss."""
        finite = [loss for loss in self.by_set.values() if loss is not None]
        return sum(finite) / len(finite) if finite and len(finite) == len(self.by_set) else None

    def row(self) -> dict[str, float | None]:
        """Return the keys and values for a row."""
        values: dict[str, float | None] = {}
        for name, loss in self.by_set.items():
            values |= {loss_key(name): loss, f"validation/{name}/perplexity": perplexity(loss)}
        return values


def loss_key(name: str) -> str:
    """Return the key of a validation set's loss in a row."""
    return f"validation/{name}/loss"


def perplexity(loss: float | None) -> float | None:
    """Return exp of a loss in nats per token; None if the loss is None or the result would overflow."""
    return math.exp(loss) if loss is not None and loss < 700 else None


def finite(value: Any) -> float | None:
    """Return a value as JSON can represent it: None if it is not a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _is_loss(key: str) -> bool:
    return len(key) > len(loss_key("")) and key.startswith("validation/") and key.endswith("/loss")
