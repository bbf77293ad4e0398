"""The router of a mixture of experts: which experts a token is sent to, with which weights.

Shapes: r tokens (rows), k experts of a token, n = r * k pairs of a token and an expert, e experts,
g groups, l layers, d hidden size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.model.shape import Backbone, Size
from depthlm.ops.dtypes import no_autocast, upcast


class Routing(NamedTuple):
    """How a router has distributed tokens. Of one layer, or of all layers, with one more dimension before the others.

    load_e: how many tokens each expert has got. balance: e * sum_e f_e P_e, where f_e is the share of the tokens that
    expert e has got, and P_e its mean score; k if both are equal everywhere. That is arXiv 2101.03961, equation 4,
    where k is 1, and for any k `load_balancing_loss_func` of transformers. z: the mean of logsumexp(logits)^2 (arXiv
    2202.08906, equation 5). entropy: the mean entropy of the scores, in nats. balance and z have gradients.
    """

    load_e: Tensor
    balance: Tensor
    z: Tensor
    entropy: Tensor

    def penalty(self, backbone: Backbone) -> Tensor:
        """Return the auxiliary loss of a token: the mean over the layers, times the coefficients of the backbone."""
        return backbone.router_balance_loss * self.balance.mean() + backbone.router_z_loss * self.z.mean()


class Choice(NamedTuple):
    """The experts of each token with their weights, the ends of their groups (`expert_ends`), and the routing."""

    experts_rk: Tensor
    weights_rk: Tensor
    ends_e: Tensor
    routing: Routing


class Router(nn.Module):
    """x_rd -> weight -> logits -> softmax or sigmoid -> scores --> (+ bias) -> best groups -> top k -> experts_rk
                                                            `----------------------------------------> weights_rk

    Computed in fp32. The bias takes part in the choice of experts, not in their weights; `balance` changes it after
    each step so that all experts get the same load, without an auxiliary loss (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
    """

    bias_e: Tensor

    def __init__(self, size: Size, backbone: Backbone):
        super().__init__()
        self.top_k = size.experts_per_token
        self.backbone = backbone
        self.weight = nn.Parameter(torch.empty(size.num_experts, size.hidden_size))
        self.register_buffer("bias_e", torch.zeros(size.num_experts) if backbone.router_bias_rate else None)

    def forward(self, x_rd: Tensor) -> Choice:
        num_experts = self.weight.shape[0]
        with no_autocast(x_rd):
            logits_re = F.linear(upcast(x_rd), upcast(self.weight))
        sigmoid = self.backbone.router_scores == "sigmoid"
        scores_re = logits_re.sigmoid() if sigmoid else logits_re.softmax(-1)
        shares_re = scores_re / scores_re.sum(-1, keepdim=True) if sigmoid else scores_re
        with torch.no_grad():
            preferred_re = scores_re if self.bias_e is None else scores_re + self.bias_e
            experts_rk = self._in_best_groups(preferred_re).topk(self.top_k).indices
            ends_e = expert_ends(experts_rk, num_experts)
            load_e = ends_e.diff(prepend=ends_e.new_zeros(1)).to(logits_re.dtype)
            entropy = torch.special.entr(shares_re).sum(-1).mean()
        weights_rk = scores_re.gather(1, experts_rk)
        if self.backbone.router_normalize:
            weights_rk = weights_rk / (weights_rk.sum(-1, keepdim=True) + 1e-20)
        balance = num_experts * (load_e / len(x_rd) * shares_re.mean(0)).sum()
        z = logits_re.logsumexp(-1).square().mean()
        return Choice(experts_rk, weights_rk * self.backbone.router_scale, ends_e, Routing(load_e, balance, z, entropy))

    def _in_best_groups(self, preferred_re: Tensor) -> Tensor:
        """Exclude the experts outside of each token's best groups. A group counts by the sum of its two best."""
        groups, kept = self.backbone.router_groups, self.backbone.router_groups_kept
        if groups == kept:
            return preferred_re
        preferred_rgm = preferred_re.unflatten(-1, (groups, -1))
        worst_rg = preferred_rgm.topk(2).values.sum(-1).topk(groups - kept, largest=False).indices
        excluded = torch.zeros_like(preferred_rgm[..., 0], dtype=torch.bool).scatter(1, worst_rg, True)
        return preferred_rgm.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(1)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.normal_(0, std, generator=generator)

    def _apply(self, fn: Callable, recurse: bool = True) -> "Router":
        # the steps of the bias would be lost in bf16, to which an engine may cast a model
        bias_e = self.bias_e
        super()._apply(fn, recurse)
        if bias_e is not None and self.bias_e.dtype != bias_e.dtype:
            self.bias_e = bias_e.to(self.bias_e.device)
        return self


def expert_ends(experts_rk: Tensor, num_experts: int) -> Tensor:
    """Return ends_e in int32: the pairs of expert i end there, if all pairs are sorted by expert. Never waits."""
    sorted_n = experts_rk.flatten().sort().values
    numbers_e = torch.arange(num_experts, device=experts_rk.device, dtype=experts_rk.dtype)
    return torch.searchsorted(sorted_n, numbers_e, right=True, out_int32=True)
