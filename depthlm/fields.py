"""The declaration of a configuration key: its default, its documentation and its bounds.

Every dataclass of the schema uses `key`, so that `train.py --help` and the checks share one definition. Pydantic reads
the bounds from the metadata of a field (`depthlm.config.keys`); the dataclasses themselves need no pydantic.
"""

import dataclasses
from typing import Any, Literal

# the smallest normal number of fp32: a GPU may take a smaller one for 0
TINY = 2.0**-126

OnResume = Literal["free", "logged", "fixed"]


def key(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    min_length: int | None = None,
    on_resume: OnResume = "fixed",
    protocol: bool = True,
    outside: bool = False,
) -> Any:
    """Return a documented dataclass field. The allowed values of a text are its type, a Literal.

    minimum, maximum: inclusive bounds. above: exclusive lower bound. min_length: of a list.
    on_resume: whether a run may resume with another value. free: yes, since it does not affect the result; logged: yes,
    with a line in the log, since it affects at most rounding or the treatment of bad batches; fixed: no.
    protocol: whether runs that are compared must share the value.
    outside: whether the value names something outside of the run, such as a path, an address or a service. Only the
    user's own runs may name it freely (`depthlm.config.saved`).
    """
    metadata = {"description": doc, "on_resume": on_resume, "protocol": protocol, "outside": outside}
    bounds = {"ge": minimum, "le": maximum, "gt": above, "min_length": min_length}
    metadata |= {name: bound for name, bound in bounds.items() if bound is not None}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(schema: type, **metadata: Any) -> Any:
    """Return a field that holds a group of keys. metadata: `on_resume`, `protocol` or `outside` of all of them."""
    return dataclasses.field(default_factory=schema, metadata=metadata)
