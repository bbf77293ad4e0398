"""DeepNorm and KEEL, rows of Table 5 of Attention Residuals (arXiv 2603.15031): h <- Norm(alpha h + f(h)).

    DeepNorm (arXiv 2203.00555): alpha = (2 L)^(1/4);  the values, the output and the MLP of a layer are initialized
    with a gain of (8 L)^(-1/4)
    DeepLoop (arXiv 2607.13491), for loops: alpha = (2 L)^(1/2), and a gain of (8 L)^(-1/2), with L unrolled layers
    KEEL (arXiv 2601.19895): alpha = 2 L, the number of sublayers, and f has the norm of its input as well. The first
    attention and the first MLP are those of a pre-norm decoder: h <- h + f(h)

The norm belongs to the sublayer that reads the sum; the final norm of the decoder is that of the last sum.

sum_btd -> norm -> h --+-> * alpha ---(+)-> sum_btd
                       `-> sublayer f -^
"""

from torch import Tensor

from depthlm.model.connection import Connection, Cost, Hidden, Inputs
from depthlm.model.figures import Figure
from depthlm.model.layers import Norm
from depthlm.model.settings import check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.dtypes import upcast


class DeepNorm(Connection):
    """A residual connection with a norm of each sum.

    form: deepnorm or deeploop, in the papers with these norms only (backbone.norm_placement=none), or keel, in the
        paper with a norm of the input of each sublayer as well (pre).
    """

    why_undefined = "it normalizes each sum and has factors of the depth of its own"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone, form: str = "deepnorm"):
        super().__init__(spec, size, backbone)
        check(one_of(("deepnorm", "deeploop", "keel"), form=form))
        depth, power = 2 * spec.num_layers, 0.5 if form == "deeploop" else 0.25
        is_plain = form == "keel" and spec.sublayer < 2
        self.alpha = 1.0 if is_plain else float(depth) if form == "keel" else depth**power
        self.output_gain = 1.0 if form == "keel" else (4 * depth) ** -power
        if (2 if form == "keel" else 0) < spec.sublayer < depth:
            self.norm = Norm(size.hidden_size, backbone)
        if spec.kind != "final" and not is_plain:
            self.cost = Cost(flops=1.0 * size.hidden_size)

    def read(self, state: Hidden, weights: Tensor | None = None) -> tuple[Inputs, Tensor]:
        if not hasattr(self, "norm"):
            return (state.h,), state.h
        x_btd = self.norm(state.h) if weights is None else apply_norm(self.norm, state.h, weights)
        return (x_btd,), x_btd

    def weights(self, state: Hidden) -> Tensor | None:
        """Return the factor of the sum in the norm, w_btd."""
        return norm_weights(self.norm, state.h) if hasattr(self, "norm") else None

    def figures(self, state: Hidden) -> list[Figure]:
        weights = self.weights(state)
        about = "what each norm multiplies its sum by"
        return [] if weights is None else [Figure("scale", weights, ("batch", "token", "hidden"), about)]

    def write(self, state: Hidden, output_btd: Tensor, carry: Tensor) -> Hidden:
        return Hidden(self.alpha * carry + output_btd)


def norm_weights(norm: Norm, x_btd: Tensor) -> Tensor:
    """Return the factor of x in a norm, w_btd, after the mean is subtracted if it is a LayerNorm."""
    squares_bt1 = upcast(subtract_mean(norm, x_btd)).square().mean(-1, keepdim=True)
    return (squares_bt1 + norm.eps).rsqrt() * norm.weight


def apply_norm(norm: Norm, x_btd: Tensor, weights_btd: Tensor) -> Tensor:
    """Return the result of a norm with given `norm_weights`."""
    y_btd = (weights_btd * subtract_mean(norm, x_btd)).to(x_btd.dtype)
    return y_btd if norm.bias is None else y_btd + norm.bias


def subtract_mean(norm: Norm, x_btd: Tensor) -> Tensor:
    """Return x, less its mean if the norm is a LayerNorm."""
    return x_btd if norm.bias is None else x_btd - x_btd.mean(-1, keepdim=True)
