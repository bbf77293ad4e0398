"""Deep Delta Learning (arXiv 2601.00417), a row of Table 5 of Attention Residuals (arXiv 2603.15031).

    h <- h + beta k (v - k . h),  k = f(h) / |f(h)|
    beta = 2 sigmoid(w_beta . RMS(h) + b_beta),  v = 4 sigmoid(w_v . h + b_v)

The delta rule over depth with values of width 1: what h has along k is replaced by v, if beta is 1. A write only passes
on its arguments, and the next read performs it.

h_btd -+-> sublayer f -> k ---------------------.
       +-> beta, v ------------> beta (v - k . h) * k
       `----------------------------------------(+)-> h_btd
"""

from typing import NamedTuple

from torch import Tensor

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.figures import Figure
from depthlm.model.layers import Linear
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.dtypes import upcast
from depthlm.ops.functions import rms_norm

# of |f|, as in the code of the authors, and the largest v
NORM_EPS, LARGEST_V = 1e-5, 4.0


class State(NamedTuple):
    """h: before the pending write of f, if any."""

    h: Tensor
    pending: "Pending | None" = None

    def settled(self) -> "State":
        """Return the state after the pending write."""
        assert self.pending is not None
        return State((self.h + factor(self.h, self.pending) * self.pending.output).to(self.h.dtype))


class Pending(NamedTuple):
    output: Tensor
    beta_bt1: Tensor
    v_bt1: Tensor


class Carry(NamedTuple):
    """h: of the read. beta, v: of the write."""

    h: Tensor
    beta_bt1: Tensor
    v_bt1: Tensor


class DDL(Connection):
    """A residual connection that rewrites h along the direction of the output of a sublayer.

    As in the code of the authors, with values of width 1, beta is initially near 1 and v near 2. Assumed: beta reads h
    with a norm of its own that has no weight, where that code reads the normalized input of the sublayer.
    """

    why_undefined = "it normalizes each output, which a factor would not change"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        self.eps = backbone.norm_eps
        if spec.kind != "final":
            d = size.hidden_size
            self.beta = Linear(d, 1, bias=True)
            self.value = Linear(d, 1, bias=True)
            # |f|, k . h and the update; reads of h for beta and v and of f and h for their products
            self.cost = Cost(6.0 * d, 3.0 * d)

    def open(self, embedding_btd: Tensor) -> State:
        return State(embedding_btd)

    def read(self, state: State, weights: Tensor | None = None) -> tuple[Inputs, Carry | None]:
        h = state.h
        if state.pending is not None:
            weights = factor(h, state.pending) if weights is None else weights
            h = (h + weights * state.pending.output).to(h.dtype)
        if self.spec.kind == "final":
            return (h,), None
        beta_bt1 = 2 * upcast(self.beta(rms_norm(h, None, self.eps))).sigmoid()
        return (h,), Carry(h, beta_bt1, LARGEST_V * upcast(self.value(h)).sigmoid())

    def weights(self, state: State) -> Tensor | None:
        return None if state.pending is None else factor(state.h, state.pending)

    def figures(self, state: State) -> list[Figure]:
        if self.spec.kind == "final" or state.pending is None:
            return []
        about = "what each sublayer multiplies the output before it by"
        return [Figure("factor", factor(state.h, state.pending), ("batch", "token", "hidden"), about)]

    def write(self, state: State, output_btd: Tensor, carry: Carry) -> State:
        return State(carry.h, Pending(output_btd, carry.beta_bt1, carry.v_bt1))


def factor(h_btd: Tensor, pending: Pending) -> Tensor:
    """Return the factor of the pending output, beta (v - k . h) / |f|, as x_bt1."""
    f, h = upcast(pending.output), upcast(h_btd)
    length_bt1 = (f.square().sum(-1, keepdim=True) + NORM_EPS**2).sqrt()
    along_bt1 = (f * h).sum(-1, keepdim=True) / length_bt1
    return pending.beta_bt1 * (pending.v_bt1 - along_bt1) / length_bt1
