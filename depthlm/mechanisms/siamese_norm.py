"""SiameseNorm (arXiv 2602.08064), a row of Table 5 of Attention Residuals (arXiv 2603.15031): two residual streams.

    u <- Norm(u);  y = f(u + Norm(p));  u <- u + y / sqrt(2 l);  p <- p + y      in layer l = 1, 2, ...

f has the norm of its input that a pre-norm backbone gives it. u is normalized again and again, as with post-norm, and p
never, as with pre-norm. Both start as the embedding and get the same outputs. The final hidden state is one more
u + Norm(p). This is the form of the authors' models for images (github.com/Qwen-Applications/SiameseNorm,
deit-model-siamesenorm.py).

u_btd -> norm --+------(+)-> sublayer f -+-> / sqrt(2 l) -(+)-> u_btd
                `-------|----------------|-----------------^
p_btd --+-----> norm ---^                +---------(+)--------> p_btd
        `------------------------------------------^
"""

from typing import NamedTuple

from torch import Tensor

from depthlm.mechanisms.deepnorm import apply_norm, norm_weights
from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.layers import Norm
from depthlm.model.shape import Backbone, Size, SublayerSpec


class State(NamedTuple):
    """u: the stream with norms. p: the stream without."""

    u: Tensor
    p: Tensor


class SiameseNorm(Connection):
    """Two residual streams, with and without norms. The norm of the input of f is that of a pre-norm backbone."""

    colour = "#44AA99"
    why_undefined = "it normalizes one of its streams and has factors of the depth of its own"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        d = size.hidden_size
        self.norm_u, self.norm_p = Norm(d, backbone), Norm(d, backbone)
        self.scale = (2 * (spec.layer + 1)) ** -0.5
        # two norms and three sums; reads of both streams, and writes of their sum, of the normed one and of p
        self.cost = Cost(11.0 * d, 6.0 * d) if spec.kind != "final" else Cost()

    def open(self, embedding_btd: Tensor) -> State:
        return State(embedding_btd, embedding_btd)

    def read(self, state: State, weights: list[Tensor] | None = None) -> tuple[Inputs, Tensor]:
        if weights is None:
            u, p = self.norm_u(state.u), self.norm_p(state.p)
        else:
            u, p = apply_norm(self.norm_u, state.u, weights[0]), apply_norm(self.norm_p, state.p, weights[1])
        return (u + p,), u

    def weights(self, state: State) -> list[Tensor]:
        """Return the factors of u and p in the norms, two w_btd."""
        return [norm_weights(self.norm_u, state.u), norm_weights(self.norm_p, state.p)]

    def write(self, state: State, output_btd: Tensor, carry: Tensor) -> State:
        return State(carry + self.scale * output_btd, state.p + output_btd)
