"""Auxiliary losses of routers: pure functions in float32, which are 0 if all tokens are padding.

Each takes a Routing and returns a scalar, or takes the RoutingSums of M routings and returns [M].
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moa_fairseq.layers.routing import Routing, RoutingSums, entropies

Loss = Callable[[Routing | RoutingSums], Tensor]
# The losses by name, without a check of the family
OF_ANY_FAMILY: dict[str, Loss] = {}


def _of_families(*families: str) -> Callable[[Callable[[RoutingSums], Tensor]], Loss]:
    """Let a loss of RoutingSums take a single Routing, too, and refuse other families."""

    def decorate(loss: Callable[[RoutingSums], Tensor]) -> Loss:
        @functools.wraps(loss)
        def either(routed: Routing | RoutingSums) -> Tensor:
            if isinstance(routed, RoutingSums):
                return loss(routed)
            return loss(RoutingSums([routed])).squeeze(0)

        @functools.wraps(loss)
        def guarded(routed: Routing | RoutingSums) -> Tensor:
            if not isinstance(routed, (Routing, RoutingSums)):
                raise TypeError(
                    f"{loss.__name__} takes one Routing and not a {type(routed).__name__}: give one of them, "
                    "such as routings[0], or all of them to losses_for(model)"
                )
            if routed.family not in (None, *families):
                raise ValueError(
                    f"{loss.__name__} is a loss of {', '.join(families)}, but the routing is one of "
                    f"{routed.family}: take losses_for(layer), or OF_ANY_FAMILY[{loss.__name__!r}] of "
                    "moa_fairseq.layers.losses, which does not check this"
                )
            return either(routed)

        OF_ANY_FAMILY[loss.__name__] = either
        return guarded

    return decorate


@_of_families("MoA", "GQE", "NAMOH")
def load_balance_loss(routed: RoutingSums) -> Tensor:
    """L_a = E · Σ_i f_i · P_i, f and P normalised to sum 1 (MoA Eq. 13-15); with groups, their mean.

    1 when the load is even, E when one expert gets everything, 0 when all tokens are padding. Only P
    carries a gradient.

    Args:
        routed: a `Routing`, or the sums of M.

    Returns:
        A scalar of one decision, [M] of M.
    """
    experts = routed.load.size(-1)
    groups = routed.groups
    return (routed.load * routed.shares(routed.sums.summed_probability)).sum((1, 2)) * (
        experts / groups
    )


@_of_families("MoH")
def head_balance_loss(routed: RoutingSums) -> Tensor:
    """L_b = Σ_i P_i · f_i over the routed heads (MoH Eq. 7-8), f_i being the share of tokens that choose i.

    K / E when the load is even, for K of E routed heads. Only P carries a gradient.

    Args:
        routed: a `Routing`, or the sums of M.

    Returns:
        A scalar of one decision, [M] of M.
    """
    tokens = routed.sums.tokens.clamp_min(1.0).unsqueeze(1)
    return ((routed.sums.counts / tokens) * (routed.sums.summed_probability / tokens)).sum(1)


@_of_families("MoH")
def released_head_balance_loss(routed: RoutingSums) -> Tensor:
    """E · Σ_i P_i · f_i, as MoH's code has it (which takes the mean over layers): K when the load is even.

    Args:
        routed: a `Routing`, or the sums of M. E are its routed heads.

    Returns:
        A scalar of one decision, [M] of M.
    """
    return routed.sums.counts.size(1) * OF_ANY_FAMILY["head_balance_loss"](routed)


@_of_families("MoA")
def mutual_information_loss(routed: RoutingSums) -> Tensor:
    """−I(E; X) = H(E|X) − H(E) in nats (SUT, arXiv 2310.07096, Eq. 8); with groups, their mean.

    H(E) is the entropy of the mean probabilities over tokens, H(E|X) the mean entropy of a token's. From
    −log E, when each token is sure of its expert and all experts get equally many, to 0, when all tokens
    are routed alike. (SUT's released code adds H(E) instead of subtracting it, which rewards a collapse.)

    Args:
        routed: a `Routing`, or the sums of M.

    Returns:
        A scalar of one decision, [M] of M.
    """
    entropy, probs = routed.entropy_and_probs()
    return entropy - entropies(probs) / routed.groups


@_of_families("sigma-MoE")
def entropy_loss(routed: RoutingSums) -> Tensor:
    """−H(E) in nats, of the mean softmax over tokens (σ-MoE, arXiv 2310.10837, §5); with groups, their mean.

    From −log E, when on average all experts are equally likely, to 0. The gates may be sigmoids of the
    logits.

    Args:
        routed: a `Routing`, or the sums of M. Its logits are read, not its probabilities.

    Returns:
        A scalar of one decision, [M] of M.
    """
    return -entropies(routed.mean_softmax()) / routed.groups


@_of_families("MoA")
def z_loss(routed: RoutingSums) -> Tensor:
    """L_z = mean over tokens of (log Σ_i exp x_i)² (MoA Eq. 16); with groups, their mean.

    It stays finite where a sum of exponentials would overflow, and for any logits of padding.

    Args:
        routed: a `Routing`, or the sums of M. Its logits are read, x here.

    Returns:
        A scalar of one decision, [M] of M.
    """
    return routed.sums.squared_lse / routed.sums.tokens.clamp_min(1.0)


@_of_families()
def no_loss(routed: RoutingSums) -> Tensor:
    """Zeros: nothing evens out the loads."""
    return torch.zeros_like(routed.sums.tokens)


# What --balance-loss names.
BALANCE_LOSSES: dict[str, Loss] = {
    "moa": OF_ANY_FAMILY["load_balance_loss"],
    "moh": OF_ANY_FAMILY["head_balance_loss"],
    "moh-released": OF_ANY_FAMILY["released_head_balance_loss"],
    "mutual-information": OF_ANY_FAMILY["mutual_information_loss"],
    "entropy": OF_ANY_FAMILY["entropy_loss"],
    "none": OF_ANY_FAMILY["no_loss"],
}


def one_row(parts: Sequence[Tensor]) -> Tensor:
    """Values of the decisions of each kind as one row [M].

    Args:
        parts: one row of each kind.
    """
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def weighted_loss(
    kinds: Sequence[RoutingSums],
    balance: Sequence[Tensor],
    z: Sequence[Tensor],
    load_balance_coef: float,
    z_loss_coef: float,
    reduce: str = "sum",
) -> Tensor:
    """The scalar Σ α·L_balance + β·L_z over the decisions on which losses may act (MoA Eq. 17).

    Args:
        kinds: of `RoutingSums.by_kind`.
        balance, z: the losses of each kind, [M].
        load_balance_coef, z_loss_coef: α and β.
        reduce: "sum", or "mean" over these decisions.

    Returns:
        The sum or the mean; 0 where there are none.
    """
    places = [place for place, sums in enumerate(kinds) if sums.auxiliary]
    if not places:
        return z[0].new_zeros(())
    terms = load_balance_coef * one_row([balance[place] for place in places])
    terms = terms.add(one_row([z[place] for place in places]), alpha=z_loss_coef)
    return terms.mean() if reduce == "mean" else terms.sum()
