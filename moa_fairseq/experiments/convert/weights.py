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


def default_values(
    family: str, settings: argparse.Namespace, job: str, values_by_flag: dict[str, Any]
) -> dict[str, Any]:
    """Defaults for MoH: half of the heads are shared, and half of the others are chosen (§4.4).

    Args:
        family: the family of the new attention; only "moh" has defaults that depend on the dense model.
        settings: the settings of the dense model, for its numbers of heads.
        job: a key of `models.BODIES`.
        values_by_flag: name of a field of the family's settings → value that the user gave.

    Returns:
        Name of a field → default value; empty for other families.

    Raises:
        UserError: if encoder and decoder have so different numbers of heads that the number of shared heads
            leaves routed heads in only one of them.
    """
    if family != "moh":
        return {}
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
    routed = max(1, (fewest - shared) // 2) if fewest > shared else 0
    return {"moh_router": "query-norm", "moh_shared_heads": shared, "experts_per_token": routed}


def _attentions(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


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
        rows = dense.get(f"{attention.name}.q_proj.weight")
        if rows is None:
            raise UserError(
                f"The checkpoint lacks {attention.name}.q_proj.weight, so its attention is not fairseq's."
            )
        for part, flag in (("q_proj", "--attention-head-dim"), ("k_proj", "--key-heads")):
            name = f"{attention.name}.{part}.weight"
            if dense[name].size(0) != attention.embed_dim:
                raise UserError(
                    f"{name} has {dense[name].size(0)} rows instead of {attention.embed_dim}: models with "
                    f"{flag} cannot be converted."
                )
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


def _fill_heads(attention: MixtureOfHeads) -> str | None:
    """Divide W_O of a MoH by its equal gates, which the paper's scaling makes small; why it is not exact."""
    router = attention.router
    routed = attention.num_heads - attention.shared_heads
    every_head = attention.experts_per_token == routed
    if not router.reads_queries:
        # If only some heads were chosen, equal logits would leave the choice to chance
        if every_head:
            nn.init.zeros_(router.projection.weight)
        attention.out_proj.weight *= 1 / _even_gates(attention).repeat_interleave(
            attention.head_dim
        )
    if every_head:
        return None
    active = attention.active_heads
    return f"{active} of {attention.num_heads} heads are active per token; the others' outputs are left out."


def _even_gates(attention: MixtureOfHeads) -> Tensor:
    """The gates of the heads, [H], that a learned router gives when all its logits are zero."""
    router = attention.router
    shared = attention.shared_heads
    gates = torch.ones(attention.num_heads)
    if router.scaling != "released":
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
        gates = _constant_gates(attention)
        name = f"{attention.name}.out_proj.weight"
        state[name] = state[name] * gates.repeat_interleave(attention.head_dim).to(state[name])
        prefixes = tuple(f"{attention.name}.{part}." for part in OF_ROUTING)
        for key in [key for key in state if key.startswith(prefixes)]:
            del state[key]
    return state


def _constant_gates(attention: Attention) -> Tensor:
    """The gates of the heads, [H]; a UserError if a head is inactive or a gate depends on the input."""
    name = attention.name
    dense = "but dense attention weights its heads equally for every input"
    if isinstance(attention, MixtureOfAttentiveExperts):
        if attention.evaluate_with != MIXTURE:
            raise UserError(
                f"--mae-evaluate-with {attention.evaluate_with}: a single expert is not dense attention."
            )
        last = None if attention.gate is None else attention.gate.fc2
        if last is not None and (last.weight.any() or (last.bias != last.bias[0]).any()):
            raise UserError(
                f"{name} has a gate that depends on its input, {dense}: only a uniform gate (--mae-gate "
                "uniform, UNI-MAE) can become dense."
            )
        return torch.ones(attention.num_heads)
    if not isinstance(attention, MixtureOfHeads):
        raise UserError(
            f"{name} is a {type(attention).__name__}, whose heads share keys or a latent, or have "
            "projections that tokens choose: fairseq's own attention does not compute that."
        )
    if attention.active_heads != attention.num_heads:
        raise UserError(
            f"{name} has {attention.active_heads} of {attention.num_heads} active heads, which differ "
            "between tokens, but in dense attention all heads are active: only 100 % can become dense."
        )
    if attention.router.reads_queries:
        return torch.ones(attention.num_heads)
    if attention.router.projection.weight.any():
        raise UserError(
            f"{name} has gates that depend on its input, {dense}: a learned router cannot become dense "
            "once it is trained."
        )
    return _even_gates(attention)
