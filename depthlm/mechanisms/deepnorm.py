"""DeepNorm (arXiv 2203.00555), a row of Table 5 of Attention Residuals (arXiv 2603.15031): h <- Norm(alpha h + f(h)).

    alpha = (2 L)^(1/4);  the values, the output and the MLP of a layer are initialized with a gain of (8 L)^(-1/4)

The norm belongs to the sublayer that reads the sum; the final norm of the decoder is that of the last sum.

sum_btd -> norm -> h --+-> * alpha ---(+)-> sum_btd
                       `-> sublayer f -^
"""

from torch import Tensor

from depthlm.model.connection import Connection, Cost, Hidden, Inputs
from depthlm.model.layers import Norm
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.dtypes import upcast


class DeepNorm(Connection):
    """A residual connection with a norm of each sum.

    In the paper's form these are the only norms: set backbone.norm_placement=none.
    """

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        self.alpha = (2 * spec.num_layers) ** 0.25
        self.output_gain = (8 * spec.num_layers) ** -0.25
        if 0 < spec.sublayer < 2 * spec.num_layers:
            self.norm = Norm(size.hidden_size, backbone)
        if spec.kind != "final":
            self.cost = Cost(flops=1.0 * size.hidden_size)

    def read(self, state: Hidden, weights: Tensor | None = None) -> tuple[Inputs, Tensor]:
        if not hasattr(self, "norm"):
            return (state.h,), state.h
        if weights is None:
            x_btd = self.norm(state.h)
        else:
            x_btd = (weights * self.centred(state.h)).to(state.h.dtype)
            x_btd = x_btd if self.norm.bias is None else x_btd + self.norm.bias
        return (x_btd,), x_btd

    def weights(self, state: Hidden) -> Tensor | None:
        """Return what the norm multiplies the sum by, w_btd."""
        if not hasattr(self, "norm"):
            return None
        squares_bt1 = upcast(self.centred(state.h)).square().mean(-1, keepdim=True)
        return (squares_bt1 + self.norm.eps).rsqrt() * self.norm.weight

    def centred(self, h_btd: Tensor) -> Tensor:
        """Return the sum, less its mean if the norm is a LayerNorm."""
        return h_btd if self.norm.bias is None else h_btd - h_btd.mean(-1, keepdim=True)

    def write(self, state: Hidden, output_btd: Tensor, carry: Tensor) -> Hidden:
        return Hidden(self.alpha * carry + output_btd)
