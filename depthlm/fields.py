"""The declaration of a configuration key: its default, its documentation and its allowed values.

Every dataclass of the schema uses `key`, so that `train.py --help` and the checks share one definition.
"""

import dataclasses
from typing import Any


def key(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    count: bool = False,
) -> Any:
    """Return a documented dataclass field.

    choices: the allowed strings. minimum, maximum: inclusive bounds. above: exclusive lower bound.
    count: whether the value is an integer that may also be written as `300M` or `10B`.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "count": count,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
