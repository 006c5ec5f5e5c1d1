"""The science: routers, losses, one module per paper, one shared attention core. It needs torch alone."""

from moa_fairseq.attention.collector import collect_decisions, query_padding
from moa_fairseq.attention.dense import DenseAttention
from moa_fairseq.attention.gqe import GroupedQueryExperts
from moa_fairseq.attention.losses import load_balance_loss, z_loss
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.moa import MixtureOfAttention
from moa_fairseq.attention.moh import MixtureOfHeads
from moa_fairseq.attention.namoh import NativeMixtureOfHeads
from moa_fairseq.attention.observers import observers_of, update_observers
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.attention.switchhead import SwitchHeadAttention

__all__ = [
    "DenseAttention",
    "GroupedQueryExperts",
    "MixtureOfAttention",
    "MixtureOfAttentiveExperts",
    "MixtureOfHeads",
    "NativeMixtureOfHeads",
    "RoutingDecision",
    "SwitchHeadAttention",
    "collect_decisions",
    "load_balance_loss",
    "observers_of",
    "query_padding",
    "update_observers",
    "z_loss",
]
