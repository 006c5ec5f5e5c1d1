"""What every mixture of attention heads shares: fairseq's attention call, written once."""

import abc
from dataclasses import dataclass, field, fields
from typing import Any, Dict, Generic, List, Optional, Sequence, Tuple, TypeVar, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from moa_fairseq.attention.cache import (
    Cache,
    CachedAttention,
    IncrementalState,
    cached_length,
    extend_cache,
    extend_padding,
)
from moa_fairseq.attention.collector import carried_context, padding_of_queries, record
from moa_fairseq.attention.core import attend, mark_causal
from moa_fairseq.attention.head_gate import HEAD_GATES, HeadGate
from moa_fairseq.attention.positions import POSITIONS_IN_ATTENTION, Positions
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.errors import UserError, check_choice


def flag(default: Any, help: str, choices: Optional[Sequence[str]] = None) -> Any:
    """A field of a dataclass of settings: `--field-name`, with a help text and, if need be, choices."""
    return field(default=default, metadata={"help": help, **({"choices": choices} if choices else {})})


@dataclass
class FamilySettings(abc.ABC):
    """The base of a family's settings: a dataclass whose fields are its flags."""

    @abc.abstractmethod
    def build(self, embed_dim: int, num_heads: int, causal: bool, **role: Any) -> "MixtureAttention[Any]":
        """The attention of a layer of width embed_dim.

        num_heads: the number of heads in the model's flags; causal: whether it stands in a decoder, where a
        query must not see later positions; role: further arguments of `MixtureAttention`. Raises UserError
        for impossible settings.
        """

    def arguments(self, **names: str) -> Dict[str, Any]:
        """Every setting as an argument of the attention; names: those of arguments called otherwise."""
        return {names.get(each.name, each.name): getattr(self, each.name) for each in fields(self)}

    def check(self, attentions: Sequence["MixtureAttention[Any]"]) -> None:  # noqa: B027 (most have nothing to check)
        """Check all attentions of a model. Raises UserError for settings that do not fit it."""


Decision = TypeVar("Decision", bound=Optional[RoutingDecision])


class MixtureAttention(CachedAttention, abc.ABC, Generic[Decision]):
    """A drop-in for fairseq's `MultiheadAttention` whose heads are chosen or weighted token by token.

    A family supplies `route`, `project_queries`, `project_keys_values`, `project_output`, and its cost:
    `projection_macs`; one that decides about keys, too, `route_keys`. keys_by_expert: whether `attend_heads`
    has to know which experts keys are of, also those of a cache. self_attention: keys and values are made
    from the queries' own input; encoder_decoder_attention: of an encoder's output, given as `key`. dropout:
    probability with which attention weights are dropped, or a module that has it as `p` (fairseq's
    FairseqDropout).
    positions: of self-attention, a name of POSITIONS_IN_ATTENTION; others are embeddings. num_heads,
    head_dim: H and D of the attention itself; key_heads: G, if it is not H. head_gate: a sigmoid gate on
    each head's output, one of HEAD_GATES; own_heads: how many heads have parameters of their own, if not H.
    """

    keys_by_expert = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        dropout: Union[float, nn.Module] = 0.0,
        positions: Optional[str] = None,
        key_heads: Optional[int] = None,
        head_gate: str = "none",
        own_heads: Optional[int] = None,
    ):
        super().__init__()
        check_choice("--head-gate", head_gate, HEAD_GATES)
        self._path: Optional[str] = None
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, head_dim
        self.key_heads = key_heads or num_heads
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention
        self.dropout_module = dropout if isinstance(dropout, nn.Module) else nn.Dropout(dropout)
        self.head_gate: Optional[HeadGate] = None
        if head_gate != "none":
            self.head_gate = HeadGate(embed_dim, own_heads or num_heads, head_dim, head_gate)
        self.positions: Optional[Positions] = None
        if self_attention and positions in POSITIONS_IN_ATTENTION:
            kind = POSITIONS_IN_ATTENTION[positions]
            self.positions = kind.of_attention(embed_dim, self.key_heads, head_dim)

    @property
    def sees_later(self) -> bool:
        """Whether what is decided at a position follows from later ones, which no mask hides."""
        return False

    @property
    def name(self) -> str:
        """The path in the model once `name_attentions` has given one; decisions are reported under it."""
        return self._path or self._state_key

    @name.setter
    def name(self, path: str) -> None:
        self._path = path

    @abc.abstractmethod
    def route(self, x: Tensor, padding: Optional[Tensor], cache: Optional[Cache]) -> Decision:
        """The decision for queries x [B, T, C]; padding [B, T], True = padding. cache: of earlier steps.

        None where a setting of the family leaves nothing to decide about queries.
        """

    @abc.abstractmethod
    def project_queries(self, x: Tensor, decision: Decision) -> Tensor:
        """x [B, T, C] → queries [B, H, T, D]."""

    def route_keys(
        self, key: Tensor, decision: Decision, padding: Optional[Tensor]
    ) -> Optional[RoutingDecision]:
        """The decision about key [B, S, kdim], padding [B, S]; None where there is nothing to decide.

        decision: about the queries. It is returned where it is about the same tokens and decides for both;
        another one is recorded here.
        """
        return None

    @abc.abstractmethod
    def project_keys_values(
        self, key: Tensor, value: Tensor, source: Optional[RoutingDecision]
    ) -> Tuple[Tensor, Tensor]:
        """key [B, S, kdim], value [B, S, vdim] → keys and values [B, G, S, D], G dividing H.

        source: what `route_keys` decided.
        """

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decision: Decision,
        attn_mask: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        need_weights: bool,
        bias: Optional[Tensor],
        key_index: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """`core.attend`; a family whose decision determines which queries there are overrides it.

        key_index [B, S, K]: the experts of keys, where `keys_by_expert`.
        """
        return attend(q, k, v, attn_mask, key_padding_mask, self._dropout_now, need_weights, bias)

    def head_index(self, decision: Decision) -> Optional[Tensor]:
        """Which head stands in each place of a token, [B·T, H]; None: head i in place i."""
        return None

    @abc.abstractmethod
    def project_output(self, heads: Tensor, decision: Decision) -> Tensor:
        """Attention results [B, H, T, D] → [B, T, C]."""

    @abc.abstractmethod
    def projection_macs(self, queries: int, keys: int) -> Dict[str, int]:
        """Multiply-accumulates of one sequence with so many tokens, by part: "router" and "projections"."""

    def macs(self, queries: int, keys: int) -> Dict[str, int]:
        """All multiply-accumulates of one sequence by part, "scores" (q·kᵀ and weights·v) included."""
        macs = {
            **self.projection_macs(queries, keys),
            "scores": 2 * queries * keys * self.num_heads * self.head_dim,
        }
        if self.head_gate is not None:
            macs["projections"] += queries * self.head_gate.projection.weight.numel()
        if self.positions is not None:
            for part, count in self.positions.macs(queries, keys, self.num_heads).items():
                macs[part] += count
        return macs

    def cache_bytes(self, number_bytes: int = 2) -> int:
        """Bytes that a token leaves in the cache of a generation, number_bytes for each number.

        Keys and values of G heads: G = 1 in MoA, whose experts share one (Eq. 10-11; Eq. 18-20 count the
        projections that follow), the heads in dense attention and in SwitchHead (its App. A.2). Where
        `keys_by_expert`, the experts' indices, too, of eight bytes each.
        """
        indices = 8 * self.key_heads if self.keys_by_expert else 0
        return 2 * self.key_heads * self.head_dim * number_bytes + indices

    @torch.no_grad()
    def scale_branch(self, factor: float) -> None:
        """Multiply the output projection, bias included: the residual branch then starts at that size."""
        for name in ("out_proj", "out_experts"):
            if hasattr(self, name):
                for parameter in getattr(self, name).parameters():
                    parameter.mul_(factor)
                return
        raise UserError(
            f"--attention-branch-scale: {type(self).__name__} has no output projection named out_proj or "
            "out_experts: leave the flag out."
        )

    def restore_initialization(self) -> None:
        """Draw routers and experts anew, after a model has initialised every nn.Linear (as BERT does)."""
        for child in self.children():
            reset = getattr(child, "reset_parameters", None)
            if reset is not None and not isinstance(child, nn.Linear):
                reset()

    def forward(
        self,
        query: Tensor,
        key: Optional[Tensor] = None,
        value: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
        incremental_state: Optional[IncrementalState] = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Optional[Tensor] = None,
        need_head_weights: bool = False,
        query_padding_mask: Optional[Tensor] = None,
        *,
        mask: Optional[Tensor] = None,
        padding: Optional[Tensor] = None,
        causal: bool = False,
    ) -> Any:
        """A plain module, batch first, where only tensors are given; else fairseq's call, time first.

        **Plain**: `attention(x)`, or `attention(x, memory)` for cross-attention: x [B, T, C], memory
        [B, S, kdim] → [B, T, C]. padding [B, T] (of memory: [B, S]), True = padding; mask [T, S], additive
        float, or bool or integers, True = blocked; causal: no query sees later positions. Raises ValueError
        for other shapes.

        **fairseq's** `MultiheadAttention.forward`:

        query [T, B, C], key and value [S, B, kdim / vdim] (ignored in self-attention; may be None once
        static_kv keys are cached). key_padding_mask [B, S], True = padding; attn_mask [T, S] additive
        or bool. query_padding_mask [B, T] keeps padding out of decisions and their statistics; it
        defaults to what `query_padding` declared, or to key_padding_mask in self-attention. What stands in
        padding is not read; what the output has there is unspecified.
        Self-attention also attends to the inputs of a `carried_context` block, as keys before its own.
        Returns (output [T, B, C], weights): weights is None, [B, T, S] averaged over the heads
        (need_weights), or [H, B, T, S] (need_head_weights).
        """
        if value is None and incremental_state is None and not static_kv:
            return self._plain(query, key, mask, padding, causal)
        tgt_len, batch, _ = query.shape
        cache = self.cache_in(incremental_state)
        own_keys = key_padding_mask if self.self_attention else None
        padding = padding_of_queries(query_padding_mask, own_keys, batch, tgt_len)
        # Batch first from here on: queries and attention results then change shape without a copy.
        rows = query.transpose(0, 1).contiguous()
        x = _without_padding(rows, padding)
        decision = self.route(x, padding, cache)
        if decision is not None:
            record(self.name, decision)

        q = self.project_queries(x, decision)
        cached, bias = cached_length(cache), None
        k = v = key_index = None
        if not (static_kv and cached):
            if self.self_attention:
                key = value = x if padding is own_keys else _without_padding(rows, own_keys)
                carried = carried_context.get()
                if carried is not None:
                    key = value = torch.cat([carried.transpose(0, 1).to(x.dtype), key], dim=1)
                    before = (carried.size(0), 0)  # all of it may be seen, none of it is padding
                    attn_mask = None if attn_mask is None else F.pad(attn_mask, before)
                    if key_padding_mask is not None:
                        key_padding_mask = F.pad(key_padding_mask.bool(), before)
            else:
                assert key is not None, "no keys are given, and none are cached"
                key = key.transpose(0, 1)
                if self.encoder_decoder_attention:
                    if cache is not None and static_kv:
                        key, key_padding_mask = self.share_among_beam(cache, key, key_padding_mask)
                    # the same object: one product may then give keys and values
                    key = value = _without_padding(key, key_padding_mask)
                else:
                    assert value is not None, "keys are given without values"
                    key = _without_padding(key, key_padding_mask)
                    value = _without_padding(value.transpose(0, 1), key_padding_mask)
            source = self.route_keys(key, decision, key_padding_mask)
            k, v = self.project_keys_values(key, value, source)
            if self.keys_by_expert and source is not None:  # [B·S, K] → [B, S, K]
                key_index = source.expert_index.unflatten(0, (k.size(0), k.size(2)))
            if self.positions is not None:
                key_length = cached + k.size(2)
                first_query = key_length - tgt_len
                bias = self.positions.bias(q, key_length, first_query)
                q, k = self.positions.rotate(q, k, first_query)
        if cache is not None:
            k, v, key_index = extend_cache(cache, k, v, static_kv, key_index)
            key_padding_mask = extend_padding(cache, key_padding_mask, k.size(0), k.size(2), static_kv)
        assert k is not None and v is not None  # without a cache they were projected above
        heads, weights = self.attend_heads(
            q, k, v, decision, attn_mask, key_padding_mask, need_weights or need_head_weights, bias, key_index
        )
        if self.head_gate is not None:
            heads = self.head_gate(heads, x, self.head_index(decision))
        out = self.project_output(heads, decision)
        if weights is not None:  # [B, H, T, S] → [H, B, T, S] or [B, T, S]
            weights = weights.transpose(0, 1) if need_head_weights else weights.mean(dim=1)
        return out.transpose(0, 1), weights  # no copy: the residual sum reads any layout

    def _plain(
        self,
        x: Tensor,
        memory: Optional[Tensor],
        mask: Optional[Tensor],
        padding: Optional[Tensor],
        causal: bool,
    ) -> Tensor:
        if memory is not None and self.self_attention:
            raise ValueError("this attention was built with self_attention=True, which reads no memory")
        if x.dim() != 3 or x.size(2) != self.embed_dim:
            raise ValueError(f"x is {list(x.shape)}, not [B, T, C] with C = {self.embed_dim}")
        if memory is not None and (memory.dim() != 3 or memory.size(0) != x.size(0)):
            raise ValueError(f"memory is {list(memory.shape)}, not [B, S, kdim] with B = {x.size(0)}")
        batch, length = (x if memory is None else memory).shape[:2]
        if mask is not None and mask.shape != (x.size(1), length):
            raise ValueError(f"mask is {list(mask.shape)}, not [T, S] = {[x.size(1), length]}")
        if padding is not None and padding.shape != (batch, length):
            raise ValueError(f"padding is {list(padding.shape)}, not {[batch, length]}")
        if causal and self.sees_later:
            raise ValueError("this attention decides by the whole sequence: build it with causal=True")
        rows = x.transpose(0, 1)  # [B, T, C] → [T, B, C]
        keys = rows if memory is None else memory.transpose(0, 1)
        if causal:
            later = torch.ones(len(rows), len(keys), dtype=torch.bool, device=x.device).triu(1)
            if mask is None:
                mask = later if is_compiling() else mark_causal(later)
            else:
                is_additive = mask.is_floating_point()
                mask = mask.masked_fill(later, -torch.inf) if is_additive else mask.bool() | later
        own = padding if memory is None else None
        out: Tuple[Tensor, Optional[Tensor]] = self.forward(
            rows, keys, keys, padding, need_weights=False, attn_mask=mask, query_padding_mask=own
        )
        return out[0].transpose(0, 1)

    @property
    def _dropout_now(self) -> float:
        module = self.dropout_module
        drops = self.training or getattr(module, "apply_during_inference", False)
        return float(getattr(module, "p", 0.0)) if drops else 0.0


def _without_padding(x: Tensor, padding: Optional[Tensor]) -> Tensor:
    """Zeros for padding: x [B, T, C], padding [B, T] or longer, of which the last T count.

    What stands in padding may be NaN, which a weight of zero would not remove from a sum or a gradient.
    """
    if padding is None:
        return x
    return x.masked_fill(padding[:, padding.size(1) - x.size(1) :].bool().unsqueeze(-1), 0.0)


def name_attentions(model: nn.Module) -> List[MixtureAttention[Any]]:
    """Tell every mixture its path in `model`, such as "encoder.layers.0.self_attn"; returns them all."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, MixtureAttention)}
    for name, attention in found.items():
        attention.name = name
    return list(found.values())
