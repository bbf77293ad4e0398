"""How a configuration key is declared: its default, its documentation and what it may be.

Every dataclass of the schema uses `key`, so that `train.py --help` and the checks read the same words.
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
    """A documented field.

    choices: the strings allowed. minimum, maximum: inclusive bounds. above: exclusive lower bound.
    count: an integer that may also be written `300M` or `10B`.
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
