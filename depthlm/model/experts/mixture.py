"""A mixture of experts in the place of an MLP.

Shapes: b batch, t tokens, d hidden size.
"""

from torch import Tensor, nn

from depthlm.model.experts.experts import Experts
from depthlm.model.experts.router import Router, Routing
from depthlm.model.layers import MLP
from depthlm.model.shape import Backbone, Size


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
