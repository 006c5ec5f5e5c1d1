"""The auxiliary losses of each family, with the coefficients of its paper."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.losses import (
    Loss,
    entropy_loss,
    head_balance_loss,
    load_balance_loss,
    released_head_balance_loss,
    z_loss,
)
from moa_fairseq.layers.moh import MixtureOfHeads
from moa_fairseq.layers.routing import Routing, RoutingSums
from moa_fairseq.layers.sigma_moe import SigmaMoE

Terms = tuple[tuple[Loss, float], ...]

# MoA Eq. 17; MoH Eq. 8 with β = 0.01; GQE and NAMOH have the balance loss of Switch Transformers; sigma-MoE
# §5 for 262M parameters (for 47M: 0.0001). SwitchHead has no loss; MAE trains its gates with the task's loss.
TERMS: dict[str, Terms] = {
    "MoA": ((load_balance_loss, 0.01), (z_loss, 0.001)),
    "GQE": ((load_balance_loss, 0.01),),
    "NAMOH": ((load_balance_loss, 0.01),),
    "MoH": ((head_balance_loss, 0.01),),
    "MoH, released": ((released_head_balance_loss, 0.01),),
    "sigma-MoE": ((entropy_loss, 0.001),),
    "SwitchHead": (),
    "MAE": (),
}


class FamilyLosses:
    """The auxiliary losses of a model: a call returns their sum, each multiplied by its coefficient.

    Each loss is summed over layers; only MoH's released code takes the mean over layers.

    Args:
        terms: for each `Attention.family` in the model, pairs of a loss and its coefficient.
        reduces: the families whose losses are averaged over layers.
    """

    def __init__(self, terms: dict[str, Terms], reduces: frozenset[str] = frozenset()):
        self.terms = terms
        self.reduces = reduces

    def __call__(self, routings: Iterable[Routing]) -> Tensor:
        """The auxiliary loss, a scalar, to be added to the mean loss of a token in the task.

        Args:
            routings: all routings of a pass, which the layers return if with_routing=True.

        Raises:
            ValueError: for a routing whose family the model lacks, or that has no family, and for no routings
                if the model has losses.
            TypeError: for an item that is not a routing, such as the tuple that a layer returns.
        """
        total = torch.zeros(())
        routings = list(routings)
        if any(self.terms.values()) and not routings:
            raise ValueError(
                "there are no routings: call the layers with with_routing=True and give theirs"
            )
        for routing in routings:
            if not isinstance(routing, Routing):
                raise TypeError(
                    f"a {type(routing).__name__} stands among the routings: give one flat list, to "
                    "which each layer's tuple is added (routings.extend(…))"
                )
        counts = Counter(routing.family for routing in routings)
        for sums in RoutingSums.by_kind(routings):
            if sums.family not in self.terms:
                raise ValueError(
                    f"a routing is of {sums.family}, but these are the losses of "
                    f"{', '.join(self.terms) or 'a model without routers'}: give the routings of this model"
                )
            for loss, coefficient in self.terms[sums.family]:
                value = loss(sums).sum()
                if sums.family in self.reduces:  # layers of several sizes have one mean
                    value = value / counts[sums.family]
                total = total.to(value.device) + coefficient * value
        return total

    def __repr__(self) -> str:
        terms = {
            family: {loss.__name__: coefficient for loss, coefficient in terms}
            for family, terms in self.terms.items()
        }
        return f"FamilyLosses({terms})"


def losses_for(model: nn.Module) -> FamilyLosses:
    """The losses of a model or of one layer, with the coefficients of the papers.

    Args:
        model: a layer of this package, or a module that contains some.

    Raises:
        UserError: if layers of MoH differ in moh_scaling, and if the model contains no layer of this package.
    """
    layers = [part for part in model.modules() if isinstance(part, (Attention, SigmaMoE))]
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no layer of moa_fairseq: give a model that has some."
        )
    families = {layer.family for layer in layers if layer.family is not None}
    terms = {family: TERMS[family] for family in sorted(families)}
    routers = [layer.router for layer in layers if isinstance(layer, MixtureOfHeads)]
    released = {getattr(router, "scaling", "paper") == "released" for router in routers}
    if len(released) == 2:
        raise UserError(
            "Layers of MoH differ in moh_scaling, and so in their loss: call losses_for on each."
        )
    if True in released:
        terms["MoH"] = TERMS["MoH, released"]
        return FamilyLosses(terms, frozenset({"MoH"}))
    return FamilyLosses(terms)
