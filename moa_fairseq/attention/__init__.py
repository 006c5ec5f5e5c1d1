"""The science: routers, losses, one module per paper, one shared attention. It needs torch alone."""

from moa_fairseq.attention.base import Attention
from moa_fairseq.attention.dense import DenseAttention
from moa_fairseq.attention.expert_draw import ExpertDraw
from moa_fairseq.attention.gqe import GroupedQueryExperts
from moa_fairseq.attention.kv_cache import KVCache
from moa_fairseq.attention.losses import load_balance_loss, z_loss
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.moa import MixtureOfAttention
from moa_fairseq.attention.moh import MixtureOfHeads
from moa_fairseq.attention.namoh import NativeMixtureOfHeads
from moa_fairseq.attention.observers import observers_of, update_observers
from moa_fairseq.attention.routing import Routing
from moa_fairseq.attention.switchhead import SwitchHeadAttention

__all__ = [
    "Attention",
    "DenseAttention",
    "ExpertDraw",
    "GroupedQueryExperts",
    "KVCache",
    "MixtureOfAttention",
    "MixtureOfAttentiveExperts",
    "MixtureOfHeads",
    "NativeMixtureOfHeads",
    "Routing",
    "SwitchHeadAttention",
    "load_balance_loss",
    "observers_of",
    "update_observers",
    "z_loss",
]
