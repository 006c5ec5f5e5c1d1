"""Routers, losses, and an attention for each paper, with a shared base class. This needs torch alone."""

from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.dense import DenseAttention
from moa_fairseq.layers.expert_draw import ExpertDraw
from moa_fairseq.layers.family_losses import FamilyLosses, losses_for
from moa_fairseq.layers.gqe import GroupedQueryExperts
from moa_fairseq.layers.kv_cache import KVCache
from moa_fairseq.layers.latent import LatentAttention
from moa_fairseq.layers.losses import load_balance_loss, z_loss
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.moa import MixtureOfAttention
from moa_fairseq.layers.moh import MixtureOfHeads
from moa_fairseq.layers.namoh import NativeMixtureOfHeads
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.running_statistics import running_statistics_of, update_running_statistics
from moa_fairseq.layers.switchhead import SwitchHeadAttention

__all__ = [
    "Attention",
    "DenseAttention",
    "ExpertDraw",
    "FamilyLosses",
    "GroupedQueryExperts",
    "KVCache",
    "LatentAttention",
    "MixtureOfAttention",
    "MixtureOfAttentiveExperts",
    "MixtureOfHeads",
    "NativeMixtureOfHeads",
    "Routing",
    "SwitchHeadAttention",
    "load_balance_loss",
    "losses_for",
    "running_statistics_of",
    "update_running_statistics",
    "z_loss",
]
