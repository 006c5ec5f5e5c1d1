"""Converts the weights of an attention: from dense attention into a mixture, and back."""

from __future__ import annotations

import argparse
import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from moa_fairseq.attention.base import MixtureAttention, name_attentions
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.moa import MixtureOfAttention
from moa_fairseq.attention.moh import MixtureOfHeads
from moa_fairseq.attention.positions import POSITIONS_IN_ATTENTION, RelativePositions
from moa_fairseq.attention.single_expert import MIXTURE
from moa_fairseq.convert.checkpoints import State
from moa_fairseq.errors import UserError

# What only a mixture has, as parts of parameters' names.
OF_ROUTING = ("router", "gate")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
_SHARED_KEYS = (
    "MoA has one head of keys and values for all experts: it starts with the mean of the dense heads'. "
    "(--expert-keys-values own keeps them apart, and is exact.)"
)


def default_values(family: str, heads: Dict[str, Tuple[int, int]], given: Dict[str, Any]) -> Dict[str, Any]:
    """The family's flags where the user gave none; heads: side → number and dimension of its dense heads.

    Raises UserError where one value cannot suit both sides.
    """
    numbers = [number for number, _ in heads.values()]
    described = " and ".join(
        f"the {side} has {n} heads of {dim} dimensions" for side, (n, dim) in heads.items()
    )
    if family == "moh":  # MoH 4.4: half of the heads are shared, half of the others chosen
        fewest = min(numbers)
        shared = given.get("moh_shared_heads", fewest // 2)
        if fewest <= shared < max(numbers):
            raise UserError(
                f"--moh-shared-heads {shared} leaves heads to choose on one side only: {described}. Give at "
                f"most {fewest - 1}."
            )
        routed = max(1, (fewest - shared) // 2) if fewest > shared else 0
        return {"moh_router": "query-norm", "moh_shared_heads": shared, "experts_per_token": routed}
    if family == "moa":
        dim = given.get("expert_dim", next(iter(heads.values()))[1])
        if any(own != dim for _, own in heads.values()):
            raise UserError(
                f"--to moa makes each head an expert, and all experts have one --expert-dim ({dim} here), "
                f"but {described}. --to mae and --to moh have no such limit."
            )
        if given.get("expert_keys_values") == "own" and len(set(numbers)) > 1:
            raise UserError(
                "--expert-keys-values own makes each head one expert, and both sides have the same number "
                f"of experts, but {described}. Leave the flag out."
            )
        experts = given.get("num_experts", math.lcm(*numbers))
        return {"num_experts": experts, "experts_per_token": experts, "expert_dim": dim}
    return {}


# ---- out of dense attention


def fill(model: nn.Module, dense: State, load: Callable[[nn.Module, State], None]) -> Optional[str]:
    """Put the weights of a dense model into `model`, a new mixture of the same size.

    load(model, weights) copies weights by name. Returns None if the result computes the same function, else
    why it does not. Raises UserError where the two do not fit.
    """
    attentions = name_attentions(model)
    reasons: List[Optional[str]] = []
    state = dict(dense)
    old = {attention.name: _taken(state, attention) for attention in attentions}
    load(model, state)
    with torch.no_grad():
        for attention in attentions:
            for kind, into in _INTO.items():
                if isinstance(attention, kind):
                    reasons.append(into(attention, old[attention.name]))
                    break
            else:
                raise UserError(f"{type(attention).__name__}: no conversion of dense attention is known.")
    return next((reason for reason in reasons if reason), None)


def _taken(state: State, attention: MixtureAttention) -> State:
    """The attention's own weights; those that a mixture keeps under other names leave `state`."""
    prefix = attention.name + "."
    own = {name[len(prefix) :]: state[name] for name in state if name.startswith(prefix)}
    missing = [name for name in PROJECTIONS if f"{name}.weight" not in own]
    if missing:
        raise UserError(f"The checkpoint lacks {prefix}{missing[0]}.weight: its attention is not fairseq's.")
    if own["q_proj.weight"].size(0) != attention.embed_dim:
        raise UserError(
            f"{prefix}q_proj.weight: heads of a width of their own (--attention-head-dim) are not converted."
        )
    if isinstance(attention, MixtureOfAttention):
        for name in own:
            del state[prefix + name]
        state.update({prefix + name: value for name, value in attention.state_dict().items()})
    return own


def _into_heads(attention: MixtureOfHeads, old: State) -> Optional[str]:
    """MoH: the same weights, but W_O is divided by the even gates, which are small in the paper's scaling."""
    router, routed = attention.router, attention.num_heads - attention.shared_heads
    everyone = attention.routed_per_token == routed
    if not router.reads_queries:
        if everyone:  # with even logits, a choice of heads would be a tie
            nn.init.zeros_(router.projection.weight)
        attention.out_proj.weight *= 1 / _even_gates(attention).repeat_interleave(attention.head_dim)
    if everyone:
        return None
    active = attention.active_heads
    return f"{active} of {attention.num_heads} heads work for a token; the others' results are left out."


def _even_gates(attention: MixtureOfHeads) -> Tensor:
    """[H]: the gates of a learned router whose logits are all zero, of those heads that are chosen."""
    router, shared = attention.router, attention.shared_heads
    if router.scaling == "released":
        return torch.ones(attention.num_heads)
    gates = torch.empty(attention.num_heads)
    stage = 0.5 if router.two_stages else 1.0
    gates[:shared] = stage / max(shared, 1)
    gates[shared:] = stage / max(attention.num_heads - shared, 1)
    return gates


def _into_experts(attention: MixtureOfAttentiveExperts, old: State) -> Optional[str]:
    """MAE: even gates make its mixture dense attention."""
    if attention.gate is not None:
        nn.init.zeros_(attention.gate.fc2.weight)
        nn.init.zeros_(attention.gate.fc2.bias)
    return None


def _into_moa(attention: MixtureOfAttention, old: State) -> Optional[str]:
    """MoA: each expert has the query and the output of a head, which K even gates g weigh as 1/g undoes."""
    if isinstance(attention.positions, RelativePositions):
        raise UserError(
            "--positions xl: its weights belong to the heads of keys, and MoA's keys have other heads."
        )
    dim, experts = attention.expert_dim, attention.num_experts
    heads, rest = divmod(old["q_proj.weight"].size(0), dim)
    if rest or experts % heads or attention.heads_per_expert != 1:
        raise UserError(
            f"--num-experts {experts} of --expert-dim {dim}: experts are made of the dense attention's "
            "heads. They have a head's dimension, their number is a multiple of the heads', and "
            "--heads-per-expert is 1."
        )
    copies = experts // heads
    split = lambda weight: weight.view(heads, dim, *weight.shape[1:])  # noqa: E731
    biased = attention.q_experts.bias is not None
    attention.q_experts.weight.copy_(split(old["q_proj.weight"]).repeat(copies, 1, 1))
    out = split(old["out_proj.weight"].t()).repeat(copies, 1, 1)
    router, chosen = attention.router, attention.experts_per_token
    gate = 1 / chosen
    if router.renormalize == "none" or chosen == experts:  # where all are chosen, no gate is renormalised
        gate = 0.5 if router.activation == "sigmoid" else 1 / experts
    attention.out_experts.weight.copy_(out * (min(chosen, heads) / (gate * chosen)))
    own = attention.key_heads > 1
    if own and copies > 1:
        raise UserError("--expert-keys-values own: --num-experts must be the number of the dense heads.")
    for name, projection in (("k_proj", attention.k_proj), ("v_proj", attention.v_proj)):
        weight = old[f"{name}.weight"]
        projection.weight.copy_(weight if own else split(weight).mean(0))
        if biased:
            bias = old[f"{name}.bias"]
            projection.bias.copy_(bias if own else split(bias).mean(0))
    q_bias, out_bias = attention.q_experts.bias, attention.out_experts.bias
    if q_bias is not None and out_bias is not None:
        q_bias.copy_(split(old["q_proj.bias"]).repeat(copies, 1))
        out_bias.copy_(old["out_proj.bias"].expand(experts, -1) / (gate * chosen))
    if chosen == experts:
        nn.init.zeros_(router.get_parameter("projection.weight"))
    if not biased and any(old[name].any() for name in old if name.endswith("_proj.bias")):
        return "--no-expert-bias leaves out the biases of the dense attention."
    return None if own else _SHARED_KEYS


_INTO = {
    MixtureOfHeads: _into_heads,
    MixtureOfAttentiveExperts: _into_experts,
    MixtureOfAttention: _into_moa,
}


# ---- into dense attention


def refuse_what_fairseq_lacks(settings: argparse.Namespace) -> None:
    """Raises UserError for a mixture with parts outside its attention that no dense model has."""
    positions = getattr(settings, "positions", None)
    if positions in POSITIONS_IN_ATTENTION:
        raise UserError(
            f"--positions {positions}: fairseq's own Transformer has no positions inside its attention."
        )
    if getattr(settings, "sigma_moe_num_experts", 0):
        raise UserError(
            f"--sigma-moe-num-experts {settings.sigma_moe_num_experts}: the feed-forwards of fairseq's own "
            "Transformer have no experts."
        )


def dense_weights(model: nn.Module) -> State:
    """The weights of a dense model that computes the same: only those of the attention change.

    Raises UserError, with the reason, where there is none.
    """
    state = model.state_dict()
    for attention in name_attentions(model):
        for kind, gates_of in _OUT_OF.items():
            if isinstance(attention, kind):
                gates = gates_of(attention)
                break
        else:
            raise UserError(
                f"{attention.name} is a {type(attention).__name__}, whose experts share keys or choose among "
                "projections by token: no dense attention computes that."
            )
        name = f"{attention.name}.out_proj.weight"
        weight = state[name]
        state[name] = weight * gates.repeat_interleave(attention.head_dim).to(weight)
        for part in [key for key in state if key.startswith(attention.name + ".")]:
            if part[len(attention.name) + 1 :].split(".")[0] in OF_ROUTING:
                del state[part]
    return state


def _constant_of_mae(attention: MixtureOfAttentiveExperts) -> Tensor:
    """[H] ones, where the gate is uniform."""
    if attention.evaluate_with != MIXTURE:
        raise UserError(
            f"--mae-evaluate-with {attention.evaluate_with}: a single expert is not dense attention."
        )
    gate = attention.gate
    constant = gate is None or _is_zero(gate.fc2.weight)
    if not constant or (gate is not None and (gate.fc2.bias != gate.fc2.bias[0]).any()):
        raise UserError(
            f"{attention.name} has a gate that depends on its input, but dense attention weights its heads "
            "equally for every input: only a uniform gate (--mae-gate uniform, UNI-MAE) can become dense."
        )
    return torch.ones(attention.num_heads)


def _constant_of_moh(attention: MixtureOfHeads) -> Tensor:
    """[H] gates, where all heads work and none depends on the input."""
    if attention.active_heads != attention.num_heads:
        raise UserError(
            f"{attention.name} has {attention.active_heads} of {attention.num_heads} heads at work, which "
            "differ between tokens, but in dense attention all heads work: only 100 % can become dense."
        )
    if attention.router.reads_queries:
        return torch.ones(attention.num_heads)
    if not _is_zero(attention.router.projection.weight):
        raise UserError(
            f"{attention.name} has gates that depend on its input, but dense attention weights its heads "
            "equally for every input: a learned router cannot become dense once it is trained."
        )
    return _even_gates(attention)


def _is_zero(weight: Tensor) -> bool:
    return not weight.count_nonzero()


_OUT_OF: Dict[type, Callable[[Any], Tensor]] = {
    MixtureOfAttentiveExperts: _constant_of_mae,
    MixtureOfHeads: _constant_of_moh,
}


def biased(dense: State) -> bool:
    """Whether the dense attention of these weights has biases."""
    return any(name.endswith("q_proj.bias") for name in dense)


def heads_of(settings: argparse.Namespace, job: str) -> Dict[str, Tuple[int, int]]:
    """Side → (number, dimension) of a model's attention heads: of its encoder, decoder, or both."""
    sides: List[str] = {"masked LM": ["encoder"], "causal LM": ["decoder"]}.get(job, ["encoder", "decoder"])
    found = {}
    for side in sides:
        number = int(getattr(settings, f"{side}_attention_heads"))
        found[side] = number, int(getattr(settings, f"{side}_embed_dim")) // number
    return found
