"""Which parameters a fine-tuned mixture of attentive experts updates (MAE §5.2)."""

from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.sequence_gate import gate_parameters, gates_of

# Choices of --finetune. `all` updates every parameter, as a training without fine-tuning does.
METHODS = ("all", "ftg", "ftg_plus", "ftall")


def updated_by(model: nn.Module, method: str) -> list[Tensor]:
    """The parameters that a method updates.

    Args:
        model: a model with mixtures of attentive experts.
        method: one of METHODS. ftg updates the gates φ, ftg_plus the gates and the weights W of Eq. 4, and
            the others update all parameters.
    """
    if method in ("all", "ftall"):
        return [*model.parameters()]
    parameters: list[Tensor] = [*gate_parameters(model)]
    if method != "ftg":
        for module in model.modules():
            if isinstance(module, MixtureOfAttentiveExperts):
                parameters.append(module.out_proj.weight)
    return parameters


def freeze_rest(model: nn.Module, method: str) -> None:
    """Freeze all parameters that a method does not update.

    Args:
        model: a model whose parameters are frozen, or require gradients, in place.
        method: one of METHODS; all and ftall leave the model as it is.

    Raises:
        UserError: if the model has no gates to fine-tune.
    """
    if method in ("all", "ftall"):
        return
    if not gates_of(model):
        raise UserError(
            f"--finetune {method} updates gates, but this model has none (--mae-gate uniform): use "
            "--finetune ftall, or fine-tune a model with learned gates."
        )
    moving = {id(parameter) for parameter in updated_by(model, method)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in moving)
