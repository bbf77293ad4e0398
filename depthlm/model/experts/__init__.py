"""Mixtures of experts: MLPs of which a router chooses a few for each token."""

from depthlm.model.experts.exchange import Spread, spread_of
from depthlm.model.experts.experts import Experts, Mixture, Router, Routing, balance

__all__ = ["Experts", "Mixture", "Router", "Routing", "Spread", "balance", "spread_of"]
