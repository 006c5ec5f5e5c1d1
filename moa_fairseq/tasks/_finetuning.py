"""Which parameters a fine-tuned mixture of attentive experts updates (MAE §5.2)."""

import logging
from typing import List

from torch import nn
from torch.nn import Parameter

from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.sequence_gate import gates_of
from moa_fairseq.errors import UserError

logger = logging.getLogger(__name__)

# Of the flag --finetune. all: every parameter, as without fine-tuning.
METHODS = ("all", "ftg", "ftg_plus", "ftall")


def freeze_rest(model: nn.Module, method: str) -> None:
    """Leave gradients to what a method updates beside the gates, whose own steps are the task's affair.

    ftg: nothing. ftg_plus: the output projections W of Eq. 4, their weights only. all, ftall: everything.
    Raises UserError for a model without gates to fine-tune.
    """
    if method in ("all", "ftall"):
        return
    if not gates_of(model):
        raise UserError(
            f"--finetune {method} updates gates, and this model has none (--mae-gate uniform): use "
            "--finetune ftall, or fine-tune a model with learned gates."
        )
    moving = {id(parameter) for parameter in _gate_parameters(model)}
    if method == "ftg_plus":
        moving |= {id(parameter) for parameter in output_projections(model)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in moving)


def output_projections(model: nn.Module) -> List[Parameter]:
    """W of MAE's Eq. 4, [C, C], of every mixture of attentive experts."""
    modules = (module for module in model.modules() if isinstance(module, MixtureOfAttentiveExperts))
    return [module.out_proj.weight for module in modules]


def report_updated(model: nn.Module) -> None:
    """Say in the log how many parameters are updated: those of the gates and those that require gradients."""
    moving = {id(parameter): parameter for parameter in _gate_parameters(model)}
    moving.update({id(p): p for p in model.parameters() if p.requires_grad})
    total = sum(parameter.numel() for parameter in model.parameters())
    updated = sum(parameter.numel() for parameter in moving.values())
    logger.info(f"{updated:,} of {total:,} parameters are updated")


def _gate_parameters(model: nn.Module) -> List[Parameter]:
    return [parameter for gate in gates_of(model) for parameter in gate.parameters()]
