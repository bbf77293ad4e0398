"""The keys of `optimizer`, the class that they name, and Muon."""

from dataclasses import dataclass
from typing import Any

from depthlm.fields import TINY, key
from depthlm.lazy import lazy_attributes


@dataclass(frozen=True)
class Optimizer:
    """One optimizer for all parameters. Each module declares which of its parameters have no weight decay.

    Each of betas, eps, momentum and ns_steps is passed to the class if it has an argument of that name.
    """

    name: str = key("", "name of the optimizer in reports")
    _target_: str = key("", "class of the optimizer, a subclass of torch.optim.Optimizer")
    lr: float = key(1e-3, "peak learning rate", above=0)
    weight_decay: float = key(0.1, "decoupled weight decay of the matrices", minimum=0)
    betas: list[float] = key([0.9, 0.95], "decay rates of the moments: two in AdamW, three in AdEMAMix")
    eps: float = key(1e-8, "epsilon, as in AdamW", minimum=TINY)
    momentum: float | None = key(
        None, "momentum, as in Muon; null: the default of the class", minimum=0, maximum=0.9999
    )
    ns_steps: int | None = key(None, "Newton-Schulz iterations of Muon; null: the default of the class", minimum=1)
    needs_matrices: bool = key(
        False,
        "whether the class computes with whole matrices; if so, it needs ZeRO 0, since ZeRO 1 to 3 give it flat parts",
        on_resume="free",
    )
    settings: dict[str, Any] = key({}, "arguments of the class; they take precedence over the keys above")


# torch takes seconds to import
__getattr__ = lazy_attributes(__name__, {"MuonAndAdamW": "muon"})
