"""Parameter counts by part of the model."""

from torch import nn

from depthlm.model.experts import Mixture
from depthlm.model.layers import Embedding, Head, Norm
from depthlm.model.parameters import OwnedParameter, owned_parameters

PARTS = ("embedding", "attention", "mlp", "norms", "head", "connection")


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each part, and the "total"; works on the meta device.

    With experts, also return "activated", which excludes the experts to which a token is not sent.

    norms: the norms of the layers, of q and k, and the final norm. attention: including the mechanism's parameters.
    connection: all parameters of the connections, norms included. head: 0 if tied, since it counts as embedding.
    """
    counts = dict.fromkeys(PARTS, 0)
    for owned in owned_parameters(model):
        counts[_part(owned)] += owned.parameter.numel()
    total, idle = sum(counts.values()), 0
    for mixture in (module for module in model.modules() if isinstance(module, Mixture)):
        experts = sum(parameter.numel() for parameter in mixture.experts.parameters())
        idle += experts - experts * mixture.router.top_k // mixture.router.weight.shape[0]
    return counts | {"total": total} | ({"activated": total - idle} if idle else {})


def _part(owned: OwnedParameter) -> str:
    if owned.name.startswith("connections."):
        return "connection"
    if isinstance(owned.owner, Norm):
        return "norms"
    if isinstance(owned.owner, Embedding | Head):
        return "embedding" if isinstance(owned.owner, Embedding) else "head"
    return "mlp" if ".mlp." in owned.name else "attention"
