"""Auxiliary losses of routers: pure functions of a RoutingDecision, float32 scalars, 0 for padding only."""

from typing import Callable, Dict

import torch
from torch import Tensor

from moa_fairseq.attention.routing import RoutingDecision


def load_balance_loss(decision: RoutingDecision) -> Tensor:
    """L_a = E · Σ_i f_i · P_i, f and P normalised to sum 1 (MoA Eq. 13-15); with groups, their mean.

    1 when the load is even, E when one expert gets everything, 0 when all tokens are padding. Only P
    carries a gradient.
    """
    load = _per_group(decision.expert_counts.to(decision.probs.dtype), decision)
    share = _per_group((decision.routed_probs * decision.kept.unsqueeze(1)).sum(0), decision)
    return load.size(1) * (load * share).sum() / load.size(0)


def head_balance_loss(decision: RoutingDecision) -> Tensor:
    """L_b = Σ_i P_i · f_i over the routed heads (MoH Eq. 7-8), f_i being the share of tokens that choose i.

    K / E when the load is even, for K of E routed heads. Only P carries a gradient.
    """
    tokens = decision.kept.sum().clamp_min(1.0)
    load = decision.expert_counts.to(decision.probs.dtype) / tokens
    share = (decision.routed_probs * decision.kept.unsqueeze(1)).sum(0) / tokens
    return (load * share).sum()


def released_head_balance_loss(decision: RoutingDecision) -> Tensor:
    """E · Σ_i P_i · f_i, as MoH's code has it (which takes the mean over layers): K when the load is even."""
    return decision.routed_probs.size(1) * head_balance_loss(decision)


def mutual_information_loss(decision: RoutingDecision) -> Tensor:
    """−I(E; X) = H(E|X) − H(E) in nats (SUT, arXiv 2310.07096, Eq. 8); with groups, their mean.

    H(E) is the entropy of the mean probabilities over tokens, H(E|X) the mean entropy of a token's. From
    −log E, when each token is sure of its expert and all experts get as many, to 0, when all tokens
    are routed alike. (SUT's released code adds H(E) instead of subtracting it, which rewards a collapse.)
    """
    probs = decision.routed_probs.reshape(decision.probs.size(0), decision.groups, -1)
    probs = probs / probs.sum(-1, keepdim=True).clamp_min(_tiny(probs))  # sigmoid gates do not add up to 1
    kept = decision.kept / decision.kept.sum().clamp_min(1.0)
    conditional = (torch.special.entr(probs).sum(-1) * kept.unsqueeze(1)).sum(0)
    marginal = torch.special.entr((probs * kept[:, None, None]).sum(0)).sum(-1)
    return (conditional - marginal).mean()


def z_loss(decision: RoutingDecision) -> Tensor:
    """L_z = mean over tokens of (log Σ_i exp x_i)² (MoA Eq. 16); with groups, their mean.

    logsumexp stays finite where the log of a sum of exponentials overflows. The logits of padding are
    replaced, not multiplied away: 0 · inf would be NaN.
    """
    kept = decision.kept
    logits = decision.logits
    if decision.padding_mask is not None:
        logits = logits.masked_fill(decision.padding_mask.unsqueeze(1), 0.0)
    logits = logits[:, decision.shared :].reshape(logits.size(0), decision.groups, -1)
    squares = torch.logsumexp(logits, dim=-1).square().mean(-1) * kept
    return squares.sum() / kept.sum().clamp_min(1.0)


def _per_group(x: Tensor, decision: RoutingDecision) -> Tensor:
    """x [E] → [groups, E / groups], each group normalised to sum 1 (or 0)."""
    x = x.view(decision.groups, -1)
    return x / x.sum(-1, keepdim=True).clamp_min(_tiny(x))


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny


# What --balance-loss names.
BALANCE_LOSSES: Dict[str, Callable[[RoutingDecision], Tensor]] = {
    "moa": load_balance_loss,
    "moh": head_balance_loss,
    "moh-released": released_head_balance_loss,
    "mutual-information": mutual_information_loss,
    "none": lambda decision: decision.probs.new_zeros(()),
}
