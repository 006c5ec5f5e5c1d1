"""Auxiliary losses of routers: pure functions of a RoutingDecision (MoA Eq. 13-16)."""

import torch
from torch import Tensor

from moa_fairseq.attention.routing import RoutingDecision


def load_balance_loss(decision: RoutingDecision) -> Tensor:
    """L_a = E · Σ_i f_i · P_i, f and P normalised to sum 1 (Eq. 13-15); a float32 scalar.

    1 when the load is even, E when one expert gets everything, 0 when all tokens are padding. Only P
    carries a gradient.
    """
    counts = decision.expert_counts.to(decision.probs.dtype)
    mass = (decision.probs * decision.kept.unsqueeze(1)).sum(0)
    tiny = torch.finfo(mass.dtype).tiny
    load = counts / counts.sum().clamp_min(tiny)
    share = mass / mass.sum().clamp_min(tiny)
    return decision.num_experts * (load * share).sum()


def z_loss(decision: RoutingDecision) -> Tensor:
    """L_z = mean over tokens of (log Σ_i exp x_i)² (Eq. 16); a float32 scalar, 0 for padding only.

    logsumexp stays finite where the log of a sum of exponentials overflows. The logits of padding are
    replaced, not multiplied away: 0 · inf would be NaN.
    """
    kept = decision.kept
    logits = decision.logits
    if decision.padding_mask is not None:
        logits = logits.masked_fill(decision.padding_mask.unsqueeze(1), 0.0)
    squares = torch.logsumexp(logits, dim=-1).square() * kept
    return squares.sum() / kept.sum().clamp_min(1.0)
