"""The pictures of each mechanism's own weights."""

from depthlm.inspect.mechanisms.depth_attention import DepthAttentionWeights
from depthlm.inspect.mechanisms.hyper_connections import MixingMaps
from depthlm.inspect.mechanisms.learned import Averages, LaurelWeights
from depthlm.inspect.mechanisms.moda import DepthProbabilities
from depthlm.inspect.mechanisms.reads import AttentionResidualWeights, StackWeights
from depthlm.inspect.picture import Collector
from depthlm.mechanisms.attention_residuals import AttentionResiduals, AttentionResidualsRecency
from depthlm.mechanisms.dca import GRN
from depthlm.mechanisms.denseformer import DenseFormer
from depthlm.mechanisms.depth_attention import DepthAttention
from depthlm.mechanisms.hyper_connections import HyperConnections, ManifoldHyperConnections
from depthlm.mechanisms.laurel import Laurel
from depthlm.mechanisms.moda import Moda

__all__ = ["COLLECTORS"]

# keyed by the exact class, because a subclass may compute something else
COLLECTORS: dict[type, type[Collector]] = {
    DepthAttention: DepthAttentionWeights,
    Moda: DepthProbabilities,
    AttentionResiduals: AttentionResidualWeights,
    AttentionResidualsRecency: AttentionResidualWeights,
    GRN: StackWeights,
    DenseFormer: Averages,
    HyperConnections: MixingMaps,
    ManifoldHyperConnections: MixingMaps,
    Laurel: LaurelWeights,
}
