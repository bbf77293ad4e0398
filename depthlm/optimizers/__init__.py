"""The keys of `optimizer`, the class that they name, and Muon."""

from dataclasses import dataclass
from typing import Any

from depthlm.fields import TINY, key, section
from depthlm.lazy import lazy_attributes


@dataclass(frozen=True)
class Group:
    """What differs for the parameters of one group."""

    weight_decay: float | None = key(
        None,
        "weight decay of the whole group; null: what a module declares, else optimizer.weight_decay for parameters of "
        "two or more dimensions and 0 for the others",
        minimum=0,
    )
    lr_scale: float = key(1.0, "factor of the learning rate, times the one that a module declares", above=0)


@dataclass(frozen=True)
class Groups:
    """The groups of parameters.

    embedding: the token embedding, also where the head is tied to it. head: the matrix of a head that is not. matrix:
    the weights of linear layers, routers and experts. vector: norms, biases, and all else of a delta attention.
    mechanism: all parameters of connections, and what an attention over depth has beside linear layers and norms.
    """

    embedding: Group = section(Group)
    head: Group = section(Group)
    matrix: Group = section(Group)
    vector: Group = section(Group)
    mechanism: Group = section(Group)


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
    groups: Groups = section(Groups)
    settings: dict[str, Any] = key({}, "arguments of the class; they take precedence over the keys above")


# torch takes seconds to import
__getattr__ = lazy_attributes(__name__, {"MuonAndAdamW": "muon"})
