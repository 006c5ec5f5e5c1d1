"""Converts the weights of an attention: from dense attention into a mixture, and back."""

import argparse
from typing import Any

import torch
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.convert.models import State, load
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.mae import MIXTURE, MixtureOfAttentiveExperts
from moa_fairseq.layers.moh import MixtureOfHeads
from moa_fairseq.layers.positions import POSITIONS_IN_ATTENTION

# Words in the names of parameters that only a mixture has
OF_ROUTING = ("router", "gate")
_BUT_DENSE = "but dense attention weights its heads equally for every input"


def moh_defaults(
    settings: argparse.Namespace, job: str, values_by_flag: dict[str, Any]
) -> dict[str, Any]:
    """Defaults for MoH: half of the heads are shared, and half of the others are chosen (§4.4).

    Args:
        settings: the settings of the dense model, for its numbers of heads.
        job: a key of `models.BODIES`.
        values_by_flag: name of a field of the family's settings → value that the user gave.

    Returns:
        Name of a field → default value.

    Raises:
        UserError: if encoder and decoder have so different numbers of heads that the number of shared heads
            leaves routed heads in only one of them.
    """
    sides = {"masked LM": ["encoder"], "causal LM": ["decoder"]}.get(job, ["encoder", "decoder"])
    heads = {side: int(getattr(settings, f"{side}_attention_heads")) for side in sides}
    fewest = min(heads.values())
    shared = values_by_flag.get("moh_shared_heads", fewest // 2)
    if fewest <= shared < max(heads.values()):
        numbers = " and ".join(f"the {side} has {number} heads" for side, number in heads.items())
        raise UserError(
            f"--moh-shared-heads {shared} leaves routed heads on one side only: {numbers}. Give at most "
            f"{fewest - 1}."
        )
    # If there are routed heads, at least one is chosen
    chosen = max(1, (fewest - shared) // 2) if shared < fewest else 0
    return {"moh_router": "query-norm", "moh_shared_heads": shared, "experts_per_token": chosen}


def fill(model: nn.Module, dense: State) -> str | None:
    """Put the weights of a dense model into a new mixture of the same size.

    Args:
        model: the mixture, which is changed in place.
        dense: the weights of the dense model by name.

    Returns:
        None if the mixture computes the same function as the dense model, else why it does not.

    Raises:
        UserError: if the names or shapes of the weights do not fit the mixture.
    """
    attentions = _attentions(model)
    for attention in attentions:
        _check_shapes(attention, dense)
    load(model, dense, may_lack=OF_ROUTING)
    reason = None
    with torch.no_grad():
        for attention in attentions:
            # With equal gates the mixture computes dense attention
            if isinstance(attention, MixtureOfAttentiveExperts):
                if attention.gate is not None:
                    nn.init.zeros_(attention.gate.fc2.weight)
                    nn.init.zeros_(attention.gate.fc2.bias)
            elif isinstance(attention, MixtureOfHeads):
                reason = _fill_heads(attention) or reason
            else:
                raise UserError(
                    f"{type(attention).__name__} cannot be converted from dense attention."
                )
    return reason


def _check_shapes(attention: Attention, dense: State) -> None:
    """Raise UserError if an attention has no weights in the dense model, or has other widths there."""
    for part, flag in (("q_proj", "--attention-head-dim"), ("k_proj", "--key-heads")):
        name = f"{attention.name}.{part}.weight"
        if name not in dense:
            raise UserError(f"The checkpoint lacks {name}, so its attention is not fairseq's.")
        if dense[name].size(0) != attention.embed_dim:
            raise UserError(
                f"{name} has {dense[name].size(0)} rows instead of {attention.embed_dim}: models with "
                f"{flag} cannot be converted."
            )


def _fill_heads(attention: MixtureOfHeads) -> str | None:
    """Make a MoH compute dense attention as far as it can: W_O is divided by its gates, which are equal.

    Returns why it is not exact, or None.
    """
    every_head = attention.active_heads == attention.num_heads
    # If only some heads were chosen, equal logits would leave the choice to chance
    if every_head and not attention.router.reads_queries:
        nn.init.zeros_(attention.router.projection.weight)
    attention.out_proj.weight /= _even_gates(attention).repeat_interleave(attention.head_dim)
    if every_head:
        return None
    active = attention.active_heads
    return f"{active} of {attention.num_heads} heads are active per token; the others' outputs are left out."


def _even_gates(attention: MixtureOfHeads) -> Tensor:
    """The gates of the heads, [H], of a router whose logits, if it has any, are all zero."""
    router = attention.router
    gates = torch.ones(attention.num_heads)
    if not router.reads_queries and router.scaling != "released":
        shared = attention.shared_heads
        stage = 0.5 if router.two_stages else 1.0
        gates[:shared] = stage / max(shared, 1)
        gates[shared:] = stage / max(attention.num_heads - shared, 1)
    return gates


def refuse_what_fairseq_lacks(settings: argparse.Namespace) -> None:
    """Check that fairseq's own Transformer can have all parts of a mixture outside the choice of experts.

    Args:
        settings: the settings of the mixture.

    Raises:
        UserError: for a setting that fairseq's own Transformer lacks.
    """
    positions = getattr(settings, "positions", None)
    if positions in POSITIONS_IN_ATTENTION:
        raise UserError(
            f"--positions {positions}: fairseq's own Transformer has no positions inside its attention."
        )
    for flag, instead in (
        ("head-gate", "attention has no gates"),
        ("query-key-norm", "attention normalises no queries and keys"),
        ("window", "attention has no window"),
        ("gated-feed-forward", "feed-forward is not gated"),
        ("rms-norm", "norms are layer norms"),
    ):
        value = getattr(settings, flag.replace("-", "_"), None)
        if value not in (None, False, "none"):
            value_text = "" if value is True else f" {value}"
            raise UserError(f"--{flag}{value_text}: the {instead} in fairseq's own Transformer.")
    scale = getattr(settings, "attention_output_scale", None)
    if scale not in (None, 1.0):
        raise UserError(
            f"--attention-output-scale {scale}: fairseq's own Transformer has no constant factor on the "
            "attention's output. Convert to another family, or keep the checkpoint."
        )
    if experts := getattr(settings, "sigma_moe_num_experts", 0):
        raise UserError(
            f"--sigma-moe-num-experts {experts}: the feed-forwards of fairseq's own Transformer have no "
            "experts."
        )


def dense_weights(model: nn.Module) -> State:
    """The weights of the dense model that computes the same function as a mixture.

    Args:
        model: the mixture.

    Raises:
        UserError: if there is no such dense model; the message gives the reason.
    """
    state = model.state_dict()
    for attention in _attentions(model):
        if isinstance(attention, MixtureOfAttentiveExperts):
            _check_expert_gates(attention)
        elif isinstance(attention, MixtureOfHeads):
            _check_head_gates(attention)
            name = f"{attention.name}.out_proj.weight"
            gates = _even_gates(attention).repeat_interleave(attention.head_dim)
            state[name] = state[name] * gates.to(state[name])
        else:
            raise UserError(
                f"{attention.name} is a {type(attention).__name__}, whose heads share keys or a latent, or "
                "have projections that tokens choose: fairseq's own attention does not compute that."
            )
        prefixes = tuple(f"{attention.name}.{part}." for part in OF_ROUTING)
        for key in [key for key in state if key.startswith(prefixes)]:
            del state[key]
    return state


def _check_expert_gates(attention: MixtureOfAttentiveExperts) -> None:
    """Raise UserError if the gates of the experts depend on the input."""
    if attention.evaluate_with != MIXTURE:
        raise UserError(
            f"--mae-evaluate-with {attention.evaluate_with}: a single expert is not dense attention."
        )
    last = None if attention.gate is None else attention.gate.fc2
    if last is not None and (last.weight.any() or (last.bias != last.bias[0]).any()):
        raise UserError(
            f"{attention.name} has a gate that depends on its input, {_BUT_DENSE}: only a uniform gate "
            "(--mae-gate uniform, UNI-MAE) can become dense."
        )


def _check_head_gates(attention: MixtureOfHeads) -> None:
    """Raise UserError if a head is inactive, or if the gates of the heads depend on the input."""
    if attention.active_heads != attention.num_heads:
        raise UserError(
            f"{attention.name} has {attention.active_heads} of {attention.num_heads} active heads, which "
            "differ between tokens, but in dense attention all heads are active: only 100 % can become dense."
        )
    router = attention.router
    if not router.reads_queries and router.projection.weight.any():
        raise UserError(
            f"{attention.name} has gates that depend on its input, {_BUT_DENSE}: a learned router cannot "
            "become dense once it is trained."
        )


def _attentions(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]
