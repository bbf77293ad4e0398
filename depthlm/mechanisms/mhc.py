"""mHC, manifold-constrained hyper-connections (arXiv 2512.24880): a mixing map that keeps the mean of the streams.

    X <- H_res X + H_post^T f(H_pre X)
    m = alpha * (phi RMSNorm(vec X)) + b,  phi: (n^2 + 2n) x nD, with an alpha for each map
    H_pre = sigmoid(m_pre), 1 x n;  H_post = 2 sigmoid(m_post), 1 x n
    H_res = Sinkhorn-Knopp(exp(m_res)), n x n, nearly doubly stochastic, so that it does not increase the norm of X

X_btnd are n streams of width D, as in hyper_connections, which start as copies of the embedding:

    X_btnd --+-> norm, phi -> H_pre, H_post, H_res
             +-> H_pre X -> sublayer f -> H_post^T -(+)-> X_btnd
             `-> H_res X ----------------------------'

Models ship with forms of it: DeepSeek-V4 and GLM-5 without a weight of the norm, with an epsilon in the maps, Hunyuan
V4 with the identity as H_res, DeepSeek-V4.1 with the H_pre of the sublayer before. mHC-lite has a convex combination
of permutation matrices as H_res, KromHC a Kronecker product. The settings below give each form.

Shapes: b batch, t tokens, n streams (i new, j old), d hidden size.
"""

import math
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from depthlm.fields import TINY
from depthlm.mechanisms.hyper_connections import (
    COLLAPSES,
    Carry,
    Collapse,
    State,
    collapse_cost,
    copies,
    edited_maps,
    final_diagnostics,
    map_figures,
    read_with,
    rebuilds,
    stream_cost,
    stream_diagnostics,
)
from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.figures import Figure
from depthlm.model.settings import at_least, check, number, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.dtypes import no_autocast
from depthlm.ops.mhc.cpu import Form, Maps, Parameters, Pending, mhc_maps, normed_projection, read_streams
from depthlm.ops.mhc.naive import mhc_post_pre

Weights = Maps | tuple[Maps, Tensor] | Tensor | None
# five streams would have 120 permutations
MAX_PERMUTED = 4
START_OF_ALPHA = {"vanilla": 0.01, "zero": 1.0, "identity": 0.0}


class ManifoldHyperConnections(Connection):
    """Hyper-connections whose H_res is doubly stochastic, nearly or exactly, or the identity.

    With start=vanilla they are initially nearly vanilla: alpha = 0.01 leaves the maps nearly constant, the streams are
    equal, and every output is added to each of them with weight 1.

    num_streams: n.
    iterations: the number of Sinkhorn-Knopp iterations.
    residual: sinkhorn; permutations: H_res = sum_r softmax(m_res)_r P_r over the n! permutation matrices, with n! + 2n
        rows of phi, and n at most 4 (mHC-lite, arXiv 2601.05732); kronecker: H_res is the Kronecker product of the
        log2(n) matrices [[p, 1 - p], [1 - p, p]], with p the first entry of a softmax of two logits, and phi has
        2 log2(n) + 2n rows (KromHC, arXiv 2601.21579); or identity: H_res is the identity, phi has 2n rows.
    norm: weighted, or plain: an RMSNorm without a weight.
    norm_eps: the epsilon of that norm; None: the backbone's.
    post_scale: the factor of the sigmoid of H_post.
    pre_eps: added to H_pre.
    post_eps: added to H_post.
    res_eps: added to H_res after the first normalization of its columns, and to all later sums.
    start: vanilla: alpha = 0.01, and the biases give H_pre = 1/n, H_post = post_scale / 2, and H_res 0.99 on its
        diagonal, which for permutations is the weight of the identity; zero: alpha = 1, and the biases are zero;
        identity: alpha = 0, and the biases allow for post_scale, pre_eps and post_eps, so that they initially equal
        vanilla, but for res_eps, by which each sublayer reduces the streams.
    collapse: as in HyperConnections; gated: sum_i (sigmoid(m) + pre_eps)_i X_i, with m as above, of its own parameters;
        or last, with read=previous: by the H_pre of the last sublayer.
    read: own; or previous: a sublayer reads with the H_pre of the sublayer before it, and the first one reads stream 0.
        H_post and H_res are its own. So a write and the next read need one pass over the streams (DeepSeek-V4.1:
        huggingface/transformers, pull request 48721).
    """

    colour = "#CC79A7"
    identity_start = "start=identity"
    accumulates = "sum"
    width_exponents: ClassVar = {"phi": 1.0}

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        num_streams: int = 4,
        iterations: int = 20,
        collapse: str = "mean",
        residual: str = "sinkhorn",
        norm: str = "weighted",
        post_scale: float = 2.0,
        pre_eps: float = 0.0,
        post_eps: float = 0.0,
        res_eps: float = 0.0,
        start: str = "vanilla",
        read: str = "own",
        norm_eps: float | None = None,
    ):
        super().__init__(spec, size, backbone)
        check(
            at_least(1, num_streams=num_streams, iterations=iterations),
            one_of((*COLLAPSES, "gated", "last"), collapse=collapse),
            one_of(("sinkhorn", *EXACT_MAPS, "identity"), residual=residual),
            one_of(("weighted", "plain"), norm=norm),
            number(0.0, post_scale=post_scale, pre_eps=pre_eps, post_eps=post_eps, res_eps=res_eps),
            one_of(START_OF_ALPHA, start=start),
            one_of(("own", "previous"), read=read),
            [] if norm_eps is None else number(TINY, norm_eps=norm_eps),
        )
        if collapse == "last" and read == "own":
            raise ValueError("collapse=last: needs read=previous, with which the last H_pre is left for the final read")
        if residual != "sinkhorn" and res_eps:
            raise ValueError(f"res_eps={res_eps:g}: residual={residual} has no normalization to which it is added")
        if residual == "permutations" and num_streams > MAX_PERMUTED:
            raise ValueError(f"num_streams={num_streams}: residual=permutations needs at most {MAX_PERMUTED} streams")
        if residual == "kronecker" and (num_streams < 2 or num_streams & (num_streams - 1)):
            raise ValueError(f"num_streams={num_streams}: residual=kronecker needs a power of two, such as 2 or 4")
        if start == "identity":
            self.identity_start = ""
            # what the sigmoids must give
            pre, post = 1 / num_streams - pre_eps, (1 - post_eps) / post_scale if post_scale else 0.0
            if not (0 < pre < 1 and 0 < post < 1) or collapse == "sum":
                raise ValueError(
                    "start=identity: needs 1 / num_streams - pre_eps and (1 - post_eps) / post_scale between 0 and 1, "
                    "and a collapse other than sum"
                )
            self.identity_biases = logit(pre), logit(post)
        self.num_streams = num_streams
        self.iterations = iterations
        self.eps = backbone.norm_eps if norm_eps is None else norm_eps
        self.form = Form(post_scale, pre_eps, post_eps, res_eps)
        self.reads_previous = read == "previous"
        # the fused operator has no such H_res
        self.exact_map = EXACT_MAPS.get(residual)
        n, d = num_streams, size.hidden_size
        if spec.kind == "final":
            self.cost = collapse_cost(n, d, collapse)
            if collapse == "gated":
                self.collapse: Collapse | GatedCollapse = GatedCollapse(n, d, start, self.eps, pre_eps)
                # the scores read X, and the sum reads it and writes the input, where a mean reads X once
                self.cost = Cost(2.0 * n * d + 2.0 * n * n * d, float(n * d))
            elif collapse != "last":
                self.collapse = Collapse(n, collapse)
            self.reads_previous = collapse == "last"
            return
        self.start = start
        rows = {"permutations": math.factorial(n), "kronecker": 2 * (n.bit_length() - 1)}.get(residual, n * n)
        self.widths = (n, n, rows)[: 2 if residual == "identity" else 3]
        if norm == "weighted":
            self.norm = nn.Parameter(torch.empty(n * d))
        self.phi = nn.Parameter(torch.empty(sum(self.widths), n * d))
        self.alpha = nn.Parameter(torch.empty(len(self.widths)))
        self.bias = nn.Parameter(torch.empty(sum(self.widths)))
        self.fp32_parameters = tuple(self._parameters)
        self.cost = stream_cost(n, d, 2.0 * n * d * sum(self.widths), mixes=residual != "identity")

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        if name == "phi":
            tensor.normal_(0, std, generator=generator)
        elif name != "bias":
            tensor.fill_(1.0 if name == "norm" else START_OF_ALPHA[self.start])
        elif self.start != "zero":
            pre, post, *res = tensor.split(self.widths)
            n = self.num_streams
            if self.start == "identity":
                pre.fill_(self.identity_biases[0])
                post.fill_(self.identity_biases[1])
            elif n > 1:
                # the bias of H_post is 0; with one stream, H_pre = 1/2
                pre.fill_(-math.log(n - 1))
            if n > 1 and self.exact_map is mix_permutations:
                # the first permutation is the identity
                res[0].fill_(math.log(0.01 / (len(res[0]) - 1)))[0] = math.log(0.99)
            elif n > 1 and self.exact_map is kronecker:
                p = 0.99 ** (1 / math.log2(n))
                res[0].view(-1, 2).copy_(torch.tensor([math.log(p), math.log(1 - p)]))
            elif n > 1 and res:
                res[0].fill_(math.log(0.01 / (n - 1)))
                res[0].view(n, n).fill_diagonal_(math.log(0.99))

    def open(self, embedding_btd: Tensor) -> State:
        streams = copies(embedding_btd, self.num_streams)
        if not self.reads_previous:
            return State(streams)
        first_n = torch.eye(self.num_streams, dtype=embedding_btd.dtype, device=embedding_btd.device)[0]
        return State(streams, next_pre=first_n.expand(streams.shape[:3]))

    def read(self, state: State, weights: Weights = None) -> tuple[Inputs, Carry | None]:
        if self.spec.kind == "final":
            if self.reads_previous:
                weights = state.next_pre if weights is None else weights
                return (read_streams(cast(Tensor, weights), state.written()),), None
            return (self.collapse(state.written(), cast(Tensor | None, weights)),), None
        if (self.exact_map is not None or self.edit is not None) and weights is None:
            weights = self.weights(state)
        if isinstance(weights, Maps):
            return read_with(weights, state)
        if weights is not None:
            maps, next_pre = cast(tuple[Maps, Tensor], weights)
            inputs, carry = read_with(maps, state)
            return inputs, carry._replace(next_pre=next_pre)
        input_btd, streams_btnd, post_btn, res_btij, *next_pres = mhc_post_pre(
            state.streams,
            state.pending,
            self.map_parameters(),
            self.eps,
            self.iterations,
            rebuilds(self, state.streams),
            self.form,
            state.next_pre,
        )
        return (input_btd,), Carry(streams_btnd, post_btn, res_btij, *next_pres)

    def weights(self, state: State) -> Weights:
        """Return the maps, with read=previous also the H_pre of the next sublayer; of the final read w_btn, or None."""
        if self.spec.kind == "final":
            # the weights of the others are constants
            is_constant = not self.reads_previous and isinstance(self.collapse, Collapse)
            return None if is_constant else self.final_weights(state)
        if self.reads_previous:
            own = self.own_maps(state)
            return own._replace(pre_btn=cast(Tensor, state.next_pre)), own.pre_btn
        return self.own_maps(state)

    def final_weights(self, state: State) -> Tensor:
        """Return the weight of each stream in the final read, w_btn."""
        if self.reads_previous:
            return cast(Tensor, state.next_pre)
        return self.collapse.stream_weights(state.written())

    def maps(self, state: State) -> Maps:
        """Return the maps with which a sublayer reads and writes."""
        maps = self.own_maps(state)
        return maps._replace(pre_btn=cast(Tensor, state.next_pre)) if self.reads_previous else maps

    def own_maps(self, state: State) -> Maps:
        """Return the maps that follow from the streams which a sublayer reads."""
        parameters = self.map_parameters()
        maps = mhc_maps(state.written(), parameters, self.eps, self.iterations, self.form, self.exact_map)
        return edited_maps(self, maps)

    def map_parameters(self) -> Parameters:
        """Return the parameters of the maps, as the operator takes them."""
        return Parameters(self.phi, getattr(self, "norm", None), self.alpha, self.bias)

    def write(self, state: State, output_btd: Tensor, carry: Carry) -> State:
        return State(carry.streams, Pending(output_btd, carry.post_btn, carry.res_btij), carry.next_pre)

    def figures(self, state: State) -> Sequence[Figure]:
        return [] if self.spec.kind == "final" else map_figures(self.maps(state))

    def diagnostics(self, state: State, memory: dict[str, Any]) -> dict[str, Tensor]:
        """Return those of streams, and |sum - 1| of each row and column of H_res; rows are exact up to rounding."""
        if self.spec.kind == "final":
            return final_diagnostics("mhc", self.final_weights(state), memory)
        maps = self.maps(state)
        found = stream_diagnostics("mhc", maps, memory)
        if maps.res_btij is None:
            return found
        sums = {"row": maps.res_btij.sum(-1), "column": maps.res_btij.sum(-2)}
        return found | {f"mhc_{name}_deviation": (total - 1).abs() for name, total in sums.items()}


def logit(p: float) -> float:
    """Return the x with sigmoid(x) = p."""
    return math.log(p / (1 - p))


def mix_permutations(m_btr: Tensor, n: int) -> Tensor:
    """Return sum_r softmax(m)_r P_r as x_btij, in the order of itertools.permutations."""
    rows = torch.eye(n, dtype=m_btr.dtype, device=m_btr.device).unbind()
    # made on the device, since a copy to it ends the capture of a CUDA graph
    matrices_rij = torch.stack([row for order in permutations(rows) for row in order]).view(-1, n * n)
    with no_autocast(m_btr):
        return (m_btr.softmax(-1) @ matrices_rij).unflatten(-1, (n, n))


def kronecker(m_btr: Tensor, n: int) -> Tensor:
    """Return the Kronecker product of [[p, 1 - p], [1 - p, p]] as x_btij, with p, 1 - p the softmax of two entries."""
    p_btk2 = m_btr.unflatten(-1, (-1, 2)).softmax(-1)
    product = torch.ones_like(m_btr[..., :1, None])
    for factor_bt22 in torch.stack([p_btk2, p_btk2.flip(-1)], -2).unbind(2):
        product = product[..., :, None, :, None] * factor_bt22[..., None, :, None, :]
        product = product.flatten(-4, -3).flatten(-2)
    return product


# of the names of H_res: exactly doubly stochastic maps
EXACT_MAPS: dict[str, Callable[[Tensor, int], Tensor]] = {"permutations": mix_permutations, "kronecker": kronecker}


class GatedCollapse(nn.Module):
    """The final read of DeepSeek-V4 and Hunyuan V4: x_btd = sum_i (sigmoid(alpha W RMSNorm(vec X) + b) + eps)_i X_i.

    start: as in ManifoldHyperConnections. norm_eps: of the norm, which has no weight.
    """

    width_exponents: ClassVar = {"phi": 1.0}

    def __init__(self, n: int, d: int, start: str, norm_eps: float, eps: float):
        super().__init__()
        bias = logit(1 / n - eps) if start == "identity" else -math.log(n - 1) if start == "vanilla" and n > 1 else 0.0
        self.start = START_OF_ALPHA[start], bias
        self.norm_eps = norm_eps
        self.eps = eps
        self.phi = nn.Parameter(torch.empty(n, n * d))
        self.alpha = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(n))
        self.fp32_parameters = tuple(self._parameters)

    def forward(self, x_btnd: Tensor, gates_btn: Tensor | None = None) -> Tensor:
        return read_streams(self.stream_weights(x_btnd) if gates_btn is None else gates_btn, x_btnd)

    def stream_weights(self, x_btnd: Tensor) -> Tensor:
        """Return the weight of each stream, w_btn."""
        projected_btn = normed_projection(x_btnd.flatten(2), self.phi, self.norm_eps)
        return (self.alpha * projected_btn + self.bias).sigmoid() + self.eps

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        if name == "phi":
            tensor.normal_(0, std, generator=generator)
        else:
            tensor.fill_(self.start[name == "bias"])
