"""A mixture of experts as an MLP: the router, which chooses the experts of a token, and the experts.

The experts of a layer are SwiGLU MLPs whose matrices are stacked in three tensors.

Shapes: b batch, t tokens, r tokens of all sequences (rows), k experts of a token, n = r * k pairs of a token and an
expert, e experts, g groups, l layers of a forward pass (each loop counts again), d hidden size, f width of an expert,
o width of an output.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.model.experts.exchange import Sort, Spread, exchange
from depthlm.model.layers import MLP
from depthlm.model.shape import Backbone, Size
from depthlm.ops.dtypes import compute_dtype, no_autocast, upcast

# the dtypes that `torch.nn.functional.grouped_mm` takes
GROUPED = {"cpu": (torch.bfloat16, torch.float16, torch.float32), "cuda": (torch.bfloat16,)}


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


class Experts(nn.Module):
    """e SwiGLU MLPs (arXiv 2002.05202). No token is dropped: an expert takes as many as are sent to it.

    x_rd -> sort by expert -> gate_proj, up_proj -> silu(gate) * up * weight -> down_proj -> sum per token -> y_rd

    spread: the ranks over which `keep` has spread the experts; None: this rank has all of them.
    uncompiled: `grouped_linear`, outside of graphs if the model is compiled.
    """

    def __init__(self, num_experts: int, hidden_size: int, expert_size: int):
        super().__init__()
        # DeepSpeed reads it
        self.num_experts = num_experts
        self.gate_proj = nn.Parameter(torch.empty(num_experts, expert_size, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(num_experts, expert_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, expert_size))
        self.spread: Spread | None = None
        self.uncompiled: Callable[..., Tensor] = grouped_linear
        self.exchange: Callable[..., Tensor] = exchange

    def keep(self, name: str, whole_eod: Tensor, spread: Spread) -> None:
        """Replace a weight by this rank's part of the whole one, and mark it with `spread`."""
        parameter = nn.Parameter(spread.share_of(whole_eod).clone(), getattr(self, name).requires_grad)
        parameter.spread = self.spread = spread  # type: ignore[attr-defined]
        self.register_parameter(name, parameter)

    def forward(self, x_rd: Tensor, experts_rk: Tensor, weights_rk: Tensor, ends_e: Tensor) -> Tensor:
        """Return y_rd, the weighted sum of the outputs of each token's experts; collective if they are spread.

        ends_e: int32, the end of each expert's pairs in the order of experts, as of `expert_ends`.
        """
        top_k, dtype = experts_rk.shape[1], compute_dtype(x_rd)
        order_n = experts_rk.flatten().argsort(stable=True)
        inverse_n = order_n.argsort()
        x_nd = Sort.apply(x_rd.to(dtype), order_n, inverse_n, top_k)
        weights_n1 = weights_rk.to(dtype).flatten()[order_n].unsqueeze(-1)
        if self.spread is None:
            y_nd = self.compute(x_nd, ends_e, weights_n1)
        else:
            # the weights stay here: to multiply the outputs by them costs less than to send them
            y_nd = self.exchange(self.compute, self.spread, x_nd, ends_e) * weights_n1
        return Sort.apply(y_nd, inverse_n, order_n, 1).unflatten(0, (-1, top_k)).sum(1)

    def compute(self, x_nd: Tensor, ends_e: Tensor, weights_n1: Tensor | None = None) -> Tensor:
        """Return y_nd, the outputs of the experts of this rank for rows that are sorted by expert."""
        dtype = x_nd.dtype
        # torch.compile takes only these; the number of tokens of an expert would be compiled into a loop
        compiled = takes_grouped(x_nd, self.gate_proj) and dtype == torch.bfloat16
        product = grouped_linear if compiled else self.uncompiled
        if dtype == self.gate_proj.dtype:
            gate_nf, up_nf = (product(x_nd, weight, ends_e) for weight in (self.gate_proj, self.up_proj))
        else:
            # a cast copies the weights in any case
            both = torch.cat((self.gate_proj.to(dtype), self.up_proj.to(dtype)), dim=1)
            gate_nf, up_nf = product(x_nd, both, ends_e).chunk(2, dim=-1)
        hidden_nf = F.silu(gate_nf) * up_nf
        return product(hidden_nf if weights_n1 is None else hidden_nf * weights_n1, self.down_proj.to(dtype), ends_e)

    def forward_flops(self, top_k: int) -> float:
        """Return the FLOPs per token, which passes through `top_k` experts."""
        return 6.0 * top_k * self.gate_proj[0].numel()


def grouped_linear(x_nd: Tensor, weight_eod: Tensor, ends_e: Tensor) -> Tensor:
    """Return y_no: the rows up to ends_e[i] that no earlier group has, times the transpose of weight_eod[i]."""
    # a rank to which no token is sent has no rows, and all the same a backward pass
    if takes_grouped(x_nd, weight_eod) and x_nd.shape[0] > 0:
        return F.grouped_mm(x_nd, weight_eod.transpose(1, 2), offs=ends_e)
    if x_nd.is_meta:
        # shapes cannot depend on values there; equal groups take the same memory and FLOPs
        count = -(-x_nd.shape[0] // len(weight_eod))
        sizes = [min(count, max(x_nd.shape[0] - i * count, 0)) for i in range(len(weight_eod))]
    else:
        sizes = ends_e.diff(prepend=ends_e.new_zeros(1)).tolist()
    return torch.cat([F.linear(x, w) for x, w in zip(x_nd.split(sizes), weight_eod, strict=True)])


def takes_grouped(x_nd: Tensor, weight_eod: Tensor) -> bool:
    """Return whether `torch.nn.functional.grouped_mm` takes these tensors: it wants rows of multiples of 16 bytes."""
    aligned = all(width * x_nd.element_size() % 16 == 0 for width in weight_eod.shape[1:])
    return aligned and x_nd.dtype in GROUPED.get(x_nd.device.type, ())


class Mixture(nn.Module):
    """The MLP of a layer as a mixture of experts (arXiv 1701.06538), with experts that every token passes through.

    x_btd -> router -> experts_rk, weights_rk -> experts ---(+)-> y_btd
       `-------------------------------> shared_experts -----'
    """

    def __init__(self, size: Size, backbone: Backbone):
        super().__init__()
        width, shared = size.width_of_expert(), backbone.shared_experts
        self.router = Router(size, backbone)
        self.experts = Experts(size.num_experts, size.hidden_size, width)
        self.shared_experts = MLP(size.hidden_size, shared * width, backbone) if shared else None

    def forward(self, x_btd: Tensor) -> tuple[Tensor, Routing]:
        """Return y_btd and the routing of these tokens."""
        choice = self.router(x_btd.flatten(0, 1))
        y_btd = self.experts(x_btd.flatten(0, 1), *choice[:3]).view_as(x_btd)
        if self.shared_experts is not None:
            y_btd = y_btd + self.shared_experts(x_btd)
        return y_btd, choice.routing

    def forward_flops(self) -> float:
        """Return the FLOPs per token outside of `nn.Linear` children."""
        return 2.0 * self.router.weight.numel() + self.experts.forward_flops(self.router.top_k)


@torch.no_grad()
def balance(mixtures: list[Mixture], load_le: Tensor) -> None:
    """Raise the bias of each expert with less than the mean load, and lower that of the others, by one step.

    DeepSeek-V3 (arXiv 2412.19437), section 2.1.2. load_le: how many tokens of the global batch each expert has got.
    """
    for number, mixture in enumerate(mixtures):
        router = mixture.router
        if router.bias_e is not None:
            load_e = load_le[number :: len(mixtures)].sum(0)
            router.bias_e += router.backbone.router_bias_rate * (load_e.mean() - load_e).sign().to(router.bias_e.dtype)
