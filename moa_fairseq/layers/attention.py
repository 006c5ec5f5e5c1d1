"""The call of every attention here: batch first, one signature, nothing that it does not read.

Letters of shapes, here and in the other modules: B batch, T queries, S keys, C the model's width, H heads, G
heads of keys and values, D width of a head, E experts, K of them chosen by a token, N = B·T tokens.
"""

import abc
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import (
    Any,
    ClassVar,
    Literal,
    Optional,
    TypeVar,
    overload,
)

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.head_gate import HEAD_GATES, HeadGate
from moa_fairseq.layers.kv_cache import KVCache
from moa_fairseq.layers.positions import POSITIONS_IN_ATTENTION, Positions, RotaryPositions
from moa_fairseq.layers.query_key_norm import NORM_WEIGHTS, QUERY_KEY_NORMS, QueryKeyNorm
from moa_fairseq.layers.rope_scaling import RopeScaling
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.sdpa import NO_MASKS, Masks, attend, attend_with_weights
from moa_fairseq.layers.static_cache import StaticCache
from moa_fairseq.layers.torch_compat import autocast_dtype

_instances = itertools.count()
Settings = TypeVar("Settings", bound="FamilySettings")
_EMBEDDED_POSITIONS = ("learned", "sinusoidal")  # added to the words: nothing to do in an attention
# What the call of torch's and fairseq's attention has, and what it is here
_ELSEWHERE = {
    "key": "memory",
    "value": "memory",
    "key_padding_mask": "padding, True = padding",
    "attn_mask": "mask, True = blocked",
    "attention_mask": "padding, True = padding, or mask, True = blocked",
    "is_causal": "causal",
    "incremental_state": "cache=attention.new_cache()",
    "need_weights": "the method `with_weights`",
    "need_head_weights": "the method `with_weights`",
    "query_padding_mask": "query_padding",
}


def flag(default: Any, help: str, choices: Collection[str] | None = None) -> Any:
    """A field of a dataclass of settings: `--field-name`, with a help text and, if need be, choices.

    Args:
        default: of the field, and of the flag.
        help: what `--help` says about the flag.
        choices: all values that the flag takes; None: every value of the field's type.
    """
    return field(default=default, metadata={"help": help, **({"choices": choices} if choices else {})})


@dataclass(kw_only=True)
class FamilySettings:
    """The base of a family's settings: its fields are the family's flags, and its attention's keywords.

    Its own fields are those of every family's self-attention. An attention refuses what it cannot have.
    """

    attention: ClassVar[type["Attention"]]
    rope_base: Optional[float] = flag(  # noqa: UP045
        None, "base of the angles of --positions rope and rope-half (rope_theta; default: 10000)"
    )
    rope_scaling: Optional[str] = flag(  # noqa: UP045
        None,
        "JSON with slower rotations for texts longer than in training, by the names of transformers: "
        "rope_type (linear, dynamic or yarn), factor, original_max_position_embeddings, and YaRN's "
        "attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim and truncate",
    )
    rotary_dim: Optional[int] = flag(  # noqa: UP045
        None, "number of a head's values that --positions rope rotates (default: all of an even number)"
    )
    query_key_norm: str = flag(
        "none",
        "RMSNorm of queries and keys. head: of each head (Qwen3); rotated: of each head, after rotation; "
        "all-heads: of all heads as one vector (OLMo 2), for attention without routed heads",
        QUERY_KEY_NORMS,
    )
    query_key_norm_weight: str = flag("learned", "weight of --query-key-norm: learned, or none", NORM_WEIGHTS)
    window: Optional[int] = flag(  # noqa: UP045
        None,
        "sliding window of a decoder's self-attention: the number of latest positions that a query sees, its "
        "own included (default: all)",
    )

    @classmethod
    def of(cls: type[Settings], settings: Settings | None, options: dict[str, Any]) -> Settings:
        """`settings`, or those that options name.

        Args:
            settings: an object of this class, or None where options have its fields.
            options: keywords of an attention. Those that are fields of this class are taken out of it, and
                the settings put into it as `common`.

        Raises:
            TypeError: where both are given, or something else.
        """
        own = {each.name: options.pop(each.name) for each in fields(cls) if each.name in options}
        if settings is None:
            settings = cls(**own)
        elif not isinstance(settings, cls):
            raise TypeError(f"settings is {settings!r}: give {cls.__name__}, or its fields as keywords")
        elif own:
            raise TypeError(
                f"{', '.join(own)} would be ignored: give either settings or its fields as keywords"
            )
        options.setdefault("common", settings)  # for `Attention`, whichever class stands between
        return settings

    @classmethod
    def own_fields(cls) -> list[Field[Any]]:
        """The fields that this family has and others need not have."""
        common = {each.name for each in fields(FamilySettings)}
        return [each for each in fields(cls) if each.name not in common]

    def in_role(self: Settings, self_attention: bool, causal: bool) -> Settings:
        """The settings of one attention of a model: without those that its role has no meaning for.

        Args:
            self_attention: whether it attends to its own input.
            causal: whether it stands in a decoder.
        """
        off: dict[str, Any] = {}
        if not self_attention:
            off = {"rope_base": None, "rope_scaling": None, "rotary_dim": None}
            if self.query_key_norm == "rotated":
                off["query_key_norm"] = "head"
        if not (self_attention and causal):
            off["window"] = None
        return replace(self, **off)

    def check(self, attentions: Sequence["Attention"]) -> None:
        """Check the settings against all attentions of a model. This base class accepts every model.

        Args:
            attentions: of the whole model, those of other families included.

        Raises:
            UserError: for settings that do not fit the model.
        """


@dataclass
class Call:
    """One pass through an attention, as a family's `compute` sees it. Inputs are zero at padding."""

    x: Tensor  # of the queries, [B, T, C]
    memory: Tensor | None  # what keys are made of, [B, S, kdim]; None: the cache has them
    values: Tensor | None  # what values are made of, [B, S, vdim]: the same object where it is the same
    masks: Masks
    query_padding: Tensor | None = None  # [B, T] bool
    same_tokens: bool = False  # keys are made of the queries' tokens and of no others
    cache: KVCache | None = None
    need_weights: bool = False
    token_ids: Tensor | None = None  # of the queries, [B, T] int64
    draw: Any = None  # of experts: `expert_draw.ExpertDraw`


Computed = tuple[Tensor, Tensor | None, tuple[Routing, ...]]


class Attention(nn.Module, abc.ABC):
    """Attention whose heads may be chosen or weighted token by token, as a plain module.

    A family supplies `compute` and its cost, `projection_macs`.

    Args:
        embed_dim: the model's width, C.
        num_heads, head_dim: H and D of the attention itself.
        key_heads: heads of keys and values, G, if not H.
        own_heads: how many heads have parameters of their own, if not H.
        self_attention: keys and values are made of x, and of nothing else; needed for positions.
        dropout: probability with which attention weights are dropped, or a module that has it as `p`.
        positions: of self-attention, a name of POSITIONS_IN_ATTENTION; others are embeddings.
        head_gate: a sigmoid gate on each head's output, one of HEAD_GATES.
        output_scale: a constant factor c on the output, in training and afterwards: c · y. K times a mixture
            whose gates sum to 1 is the mixture with gates that sum to K.
        common: the settings whose fields of `FamilySettings` count; None: their defaults.

    Raises:
        UserError: for impossible settings.
    """

    family: ClassVar[str | None] = None  # of its routings, for `losses_for`; None: it has none
    keys_by_expert = False  # whether `compute` has to know which experts made keys, those of a cache included
    reads: frozenset[str] = frozenset()  # further keywords of the call
    memory_projections = ("k_proj", "v_proj")  # what reads the inputs of keys and those of values
    can_trim_cache = True
    is_non_causal = False  # whether a position's result follows from later ones, which no mask hides
    routes_heads = False  # whether tokens choose heads, so that no norm can go over all of them

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        *,
        key_heads: int | None = None,
        own_heads: int | None = None,
        self_attention: bool = False,
        dropout: float | nn.Module = 0.0,
        positions: str | None = None,
        head_gate: str = "none",
        output_scale: float = 1.0,
        common: FamilySettings | None = None,
    ):
        super().__init__()
        common = common or FamilySettings()
        check_choice("head_gate", head_gate, HEAD_GATES)
        if not 0 < output_scale < math.inf:
            raise UserError(f"output_scale is {output_scale}: give a positive number.")
        self.output_scale = output_scale
        self._path: str | None = None
        self._instance = next(_instances)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.key_heads = key_heads or num_heads
        self.self_attention = self_attention
        if isinstance(dropout, nn.Module):
            self.dropout_module = dropout
        else:
            self.dropout_module = nn.Dropout(dropout)
        self.head_gate: HeadGate | None = None
        if head_gate != "none":
            self.head_gate = HeadGate(embed_dim, own_heads or num_heads, head_dim, head_gate)
        self.positions: Positions | None = None
        if positions is not None:
            check_choice("positions", positions, (*_EMBEDDED_POSITIONS, *POSITIONS_IN_ATTENTION))
        if positions in POSITIONS_IN_ATTENTION:
            if not self_attention:
                raise UserError(
                    f"positions={positions!r} is for self-attention: build the layer with "
                    "self_attention=True, or leave positions out."
                )
            kind = POSITIONS_IN_ATTENTION[positions]
            rotary = _rotary_options(common)
            self.positions = kind.of_attention(embed_dim, self.key_heads, head_dim, **rotary)
        if not isinstance(self.positions, RotaryPositions):
            for name in ("rope_base", "rope_scaling", "rotary_dim"):
                if (value := getattr(common, name)) is not None:
                    raise UserError(
                        f"{name}={value} is for rotary positions: add positions='rope', or leave it out."
                    )
        self.query_key_norm = self._query_key_norm(common)
        self.window = common.window
        if self.window is not None and (not self_attention or self.window < 1):
            raise UserError(
                f"window={self.window}: give a positive number of positions, and self_attention=True, or "
                "leave it out."
            )

    def _query_key_norm(self, common: FamilySettings) -> QueryKeyNorm | None:
        kind = common.query_key_norm
        weight = common.query_key_norm_weight
        check_choice("query_key_norm", kind, QUERY_KEY_NORMS)
        check_choice("query_key_norm_weight", weight, NORM_WEIGHTS)
        if kind == "none":
            if weight != "learned":
                raise UserError(f"query_key_norm_weight={weight!r} needs a query_key_norm: leave it out.")
            return None
        if kind == "all-heads" and self.routes_heads:
            raise UserError(
                "query_key_norm='all-heads' needs all heads of every token, but here tokens choose heads: "
                "choose query_key_norm='head'."
            )
        if kind == "rotated" and not isinstance(self.positions, RotaryPositions):
            raise UserError("query_key_norm='rotated' needs positions='rope': choose query_key_norm='head'.")
        sizes = (self.num_heads, self.key_heads, self.head_dim)
        return QueryKeyNorm(*sizes, kind, weight == "learned")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy (copy.deepcopy, pickle) is another instance, which caches and names without a path show."""
        super().__setstate__(state)
        self._instance = next(_instances)

    @property
    def name(self) -> str:
        """The path in the model, such as "encoder.layers.0.self_attn", once that has given one."""
        return self._path or f"{type(self).__name__}.{self._instance}"

    @name.setter
    def name(self, path: str) -> None:
        self._path = path

    @classmethod
    def from_settings(
        cls, embed_dim: int, settings: FamilySettings, *, num_heads: int, causal: bool, **options: Any
    ) -> "Attention":
        """The attention of a model's layer.

        Args:
            embed_dim: the model's width, C.
            settings: of the family.
            num_heads: the number of heads in the model's flags, for families that have no flag of their own.
            causal: whether it stands in a decoder, for families that have to know.
            options: further arguments of the class.
        """
        settings = settings.in_role(options.get("self_attention", False), causal)
        return cls(embed_dim, settings=settings, **options)  # type: ignore[call-arg]

    @abc.abstractmethod
    def compute(self, call: Call) -> Computed:
        """One pass of a family's attention, which each family supplies.

        Args:
            call: the pass, checked, with zeros at padding.

        Returns:
            The output [B, T, C]; the attention weights [B, H, T, S] where `call.need_weights`, else None, H
            being the heads that work for a token, slot by slot; and the routings, none of dense attention.
        """

    def scaled(self, call: Call) -> Computed:
        """What `compute` returns, its output [B, T, C] multiplied by `output_scale`.

        Args:
            call: the pass, as `compute` takes it.
        """
        out, weights, routings = self.compute(call)
        if self.output_scale != 1.0:
            out = out * self.output_scale
        return out, weights, routings

    @abc.abstractmethod
    def projection_macs(self, queries: int, keys: int) -> dict[str, int]:
        """Multiply-accumulates of one sequence by part; `macs` adds scores, head gates and positions.

        Args:
            queries, keys: how many tokens of the sequence have queries, and how many keys.

        Returns:
            The numbers of "router" and of "projections".
        """

    @property
    def dropout_now(self) -> float:
        """The probability with which attention weights are dropped in this pass."""
        module = self.dropout_module
        if self.training or vars(module).get("apply_during_inference", False):
            return float(getattr(module, "p", 0.0))
        return 0.0

    @overload
    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
        query_padding: Tensor | None = None,
        with_routing: Literal[False] = False,
        **inputs: Any,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
        query_padding: Tensor | None = None,
        with_routing: Literal[True],
        **inputs: Any,
    ) -> tuple[Tensor, tuple[Routing, ...]]: ...

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
        query_padding: Tensor | None = None,
        with_routing: bool = False,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, tuple[Routing, ...]]:
        """Attend from x to itself, or to a memory.

        Args:
            x: [B, T, C].
            memory: [B, S, kdim], for cross-attention. With a cache its keys are made at the first call; B is
                B / beam_size where the cache has one: neighbouring rows of x then share a row.
            padding: of what keys are made of, True = padding: [B, T], with a memory [B, S]. With a cache also
                of all positions so far. The output at padding is unspecified.
            mask: [T, S] or [B, T, S], S the number of keys with those of the cache: additive float, or bool,
                True = blocked.
            causal: no query sees a later position.
            cache: of `new_cache`: x continues what it holds, which is extended.
            query_padding: of cross-attention's queries, [B, T]: keeps them out of statistics and losses.
            with_routing: return the routings, too. A flag, and no method, because it works through wrappers
                (torch.compile, DistributedDataParallel, checkpointing), which forward calls alone.
            inputs: token_ids [B, T] where a router chooses by a hash; draw where MAE draws experts.

        Returns:
            [B, T, C]; with_routing: a pair of it and a tuple of `Routing`: none of dense attention, one of
            most, two where keys are routed by themselves (SwitchHead; NAMOH's cross-attention).

        Raises:
            ValueError, TypeError: for what does not fit, or would not be read.
        """
        out, _, routings = self.scaled(
            self._call(x, memory, padding, mask, causal, cache, query_padding, inputs)
        )
        return (out, routings) if with_routing else out

    def with_weights(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
        query_padding: Tensor | None = None,
        **inputs: Any,
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, and the attention weights.

        Args:
            x, memory, padding, mask, causal, cache, query_padding, inputs: those of `forward`.

        Returns:
            The output [B, T, C]; the weights [B, H, T, S] from before the dropout, in float32 (float64 of
            float64), H being the heads that work for a token, slot by slot where they are chosen.

        Raises:
            ValueError, TypeError: as `forward`.
        """
        call = self._call(x, memory, padding, mask, causal, cache, query_padding, inputs)
        call.need_weights = True
        out, weights, _ = self.scaled(call)
        assert weights is not None
        return out, weights

    def new_cache(self, *, batch: int | None = None, max_length: int | None = None) -> KVCache:
        """An empty cache for one generation by this attention.

        Args:
            batch, max_length: B, and how many positions there may be, of a cache that is written in place;
                None: the cache grows.

        Raises:
            UserError: for one of the two without the other, and where an attention cannot have such a cache.
        """
        if batch is not None or max_length is not None:
            if not (batch and max_length and min(batch, max_length) > 0):
                raise UserError(
                    f"batch={batch}, max_length={max_length}: give two positive numbers, or none."
                )
            if not self.can_trim_cache or self.keys_by_expert:
                kept = (
                    "the heads that tokens chose" if self.keys_by_expert else "a running sum over positions"
                )
                raise UserError(
                    f"max_length={max_length}: a cache of {type(self).__name__} also holds {kept}, which has "
                    "no place in a cache of one size. Take new_cache() without arguments."
                )
            return StaticCache(self._instance, batch, max_length)
        return KVCache(self._instance, self.can_trim_cache, None if self.window is None else self.window - 1)

    def attend(
        self,
        call: Call,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        masks: Masks | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Results of the heads [B, H, T, D], and weights [B, H, T, S] where the call needs them.

        Args:
            call: the pass: its masks and cache, and whether it needs weights.
            q: [B, H, T, D].
            k, v: [B, G, S, D], G dividing H; None where the cache has them.
            masks: those of keys and values that `place` returned already; else they are placed here.
        """
        bias = None
        if masks is None:
            masks = call.masks
            changes = self.positions is not None or self.query_key_norm is not None
            if changes or call.cache is not None or self.window is not None:
                q, k, v, masks, bias = self.place(call, q, k, v)
        assert k is not None and v is not None  # they were projected, or the cache has them
        if call.need_weights:
            return attend_with_weights(q, k, v, masks, self.dropout_now, bias)
        return attend(q, k, v, masks, self.dropout_now, bias), None

    def place(
        self,
        call: Call,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        key_experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Masks, Tensor | None]:
        """Queries, keys and values at their positions, the cache's included, masks, and the scores' bias.

        Args:
            call: the pass; its cache is extended by the new keys and values.
            q: [B, H, T, D], as projected.
            k, v: the new ones [B, G, S', D]; None where the cache has them all.
            key_experts: [B, S', K], which experts made the new keys, where `keys_by_expert`.

        Returns:
            Queries [B, H, T, D]; keys and values [B, G, S, D] with those of the cache; masks of these S keys;
            and what positions add to the scaled scores, [B or 1, H or 1, T, S], or None.
        """
        bias = None
        cache = call.cache
        held = dropped = first_query = 0
        if cache is not None and k is not None:
            if cache.needed is not None:
                cache.slide()
            held = cache.length
            dropped = cache.dropped
        if k is not None:
            first_query = held + (k.size(2) - q.size(2))  # an int; of a cache in place a new tensor
        norm = self.query_key_norm
        if norm is not None and not norm.after_rotation:
            q, k = norm(q, k)
        if self.positions is not None and k is not None:
            static = None if cache is None else cache.max_length
            keys = held + k.size(2) - dropped if static is None else static
            bias = self.positions.bias(q, keys, first_query - dropped)
            q, k = self.positions.rotate(q, k, first_query)
        if norm is not None and norm.after_rotation:
            q, k = norm(q, k)
        masks = call.masks
        if cache is not None:
            if k is not None and v is not None:
                cache.extend(k, v, key_experts)
                padding = cache.extend_padding(masks.padding)
            else:
                padding = cache.padding if masks.padding is None else masks.padding
            if padding is not masks.padding:
                masks = masks._replace(padding=padding)
            k = cache.keys
            v = cache.values
        assert k is not None and v is not None
        if self.window is not None:
            masks = _in_window(masks, q, k, self.window, first_query - dropped)
        return q, k, v, masks, bias

    def macs(self, queries: int, keys: int) -> dict[str, int]:
        """All multiply-accumulates of one sequence by part, "scores" (q·kᵀ and weights·v) included.

        Args:
            queries, keys: how many tokens of the sequence have queries, and how many keys.

        Returns:
            The numbers of "router", "projections" and "scores", those of head gates and positions among them.
        """
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
        """Bytes that a token leaves in the cache of a generation.

        Keys and values of G heads: G = 1 in MoA, whose experts share one (Eq. 10-11; Eq. 18-20 count the
        projections that follow), the heads in dense attention and in SwitchHead (its App. A.2). Where
        `keys_by_expert`, the experts' indices, too, of eight bytes each.

        Args:
            number_bytes: bytes of each number of a key or value; 2 are half precision.
        """
        if self.keys_by_expert:
            indices = 8 * self.key_heads
        else:
            indices = 0
        return 2 * self.key_heads * self.head_dim * number_bytes + indices

    @torch.no_grad()
    def scale_branch(self, factor: float) -> None:
        """Multiply the output projection, bias included: the residual branch then starts at that size.

        Args:
            factor: what every weight and bias of `out_proj` or `out_experts` is multiplied by.

        Raises:
            UserError: for an attention that has neither.
        """
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

    def _call(
        self,
        x: Tensor,
        memory: Tensor | None,
        padding: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        cache: KVCache | None,
        query_padding: Tensor | None,
        inputs: dict[str, Any],
    ) -> Call:
        """What was given, checked, with zeros at padding: what stands there may be NaN."""
        for name in inputs:
            if name not in self.reads:
                raise TypeError(self._unread(name))
        if cache is not None and not isinstance(cache, KVCache):
            raise ValueError(f"cache is a {type(cache).__name__}: make one with new_cache()")
        is_self = memory is None and not (cache is not None and cache.holds_memory)
        if memory is not None and self.self_attention:
            raise ValueError(
                "this attention was built with self_attention=True and takes no memory: leave memory out"
            )
        beam = 1 if cache is None else cache.beam_size
        self._check_inputs(x, memory, is_self, beam)
        batch, tgt_len, _ = x.shape
        if query_padding is not None and is_self:
            raise ValueError(
                "query_padding is for cross-attention; here padding is the padding of x: give padding"
            )
        if (causal or cache is not None) and self.is_non_causal:
            raise ValueError("this attention's gate sees the whole sequence: build it with causal=True")
        if cache is not None:
            self._check_cache(cache, x, memory, mask, causal)
            if memory is not None and cache.length:
                memory = None  # its keys are there
        held = 0 if cache is None else cache.length
        static = None if cache is None else cache.max_length
        if is_self:
            src_len = held + tgt_len if static is None else static
            lengths = [(batch, tgt_len), (batch, src_len)]
        else:
            if memory is None:
                src_len = held
            else:
                src_len = memory.size(1)
            lengths = [(batch // beam, src_len)]
        if static is not None:  # whether a mask is of all positions so far, only the GPU knows
            if padding is not None and tgt_len < padding.size(-1) < static:
                lengths.append((batch, padding.size(-1)))
            if mask is not None and tgt_len <= mask.size(-1) < static:
                mask = F.pad(mask, (0, static - mask.size(-1)))
        if padding is not None:
            _check_mask("padding", padding, lengths, False)
        if query_padding is not None:
            _check_mask("query_padding", query_padding, [(batch, tgt_len)], False)
        token_ids = inputs.get("token_ids")
        if token_ids is not None and token_ids.shape != (batch, tgt_len):
            raise ValueError(f"token_ids is {list(token_ids.shape)}, not [B, T] = {[batch, tgt_len]}")
        if mask is not None:
            _check_mask("mask", mask, [(tgt_len, src_len), (batch, tgt_len, src_len)], True)
        if self.window is not None and not causal and (cache is None or tgt_len > 1):
            raise ValueError("this attention was built with a window: give causal=True")
        is_causal = causal and mask is None and is_self and static is None and not held
        if isinstance(cache, StaticCache):
            mask = _blocked(mask, cache.hidden(tgt_len, causal, x.device))
        elif causal and not (is_self and tgt_len == 1):
            first = held if is_self else 0
            later = torch.ones(tgt_len, src_len, dtype=torch.bool, device=x.device).triu(1 + first)
            mask = _blocked(mask, later)
        if is_self and padding is not None:
            query_padding = padding[:, padding.size(1) - tgt_len :]
        if query_padding is not None:
            x = without_padding(x, query_padding)
        if is_self:
            memory = x
        elif memory is not None:
            memory = without_padding(memory, padding)
        masks = NO_MASKS
        if mask is not None or padding is not None or is_causal:
            masks = Masks(mask, padding, is_causal)
        return Call(
            x,
            memory,
            memory,
            masks,
            query_padding,
            same_tokens=is_self,
            cache=cache,
            **inputs,
        )

    def _check_inputs(self, x: Tensor, memory: Tensor | None, is_self: bool, beam: int) -> None:
        keys, values = self.memory_projections
        k_proj = getattr(self, keys, None)
        if memory is None:
            default = self.embed_dim
        else:
            default = memory.size(-1)
        kdim = getattr(k_proj, "in_features", None) or getattr(k_proj, "d_in", default)
        if is_self or memory is not None:
            v_proj = getattr(self, values, None)
            vdim = getattr(v_proj, "in_features", None) or getattr(v_proj, "d_in", default)
            if kdim != vdim:
                raise ValueError(
                    f"keys (width {kdim}) and values (width {vdim}) need two inputs, but this call gives one "
                    "memory: build the layer with equal kdim and vdim"
                )
        weight = getattr(k_proj, "weight", None)
        # a quantised layer's weight is a method
        if isinstance(weight, Tensor):
            expected = weight.dtype
        else:
            expected = None
        if expected is not None and not expected.is_floating_point:
            expected = None
        for name, given, width in (("x", x, self.embed_dim), ("memory", memory, kdim)):
            if given is None:
                continue
            if given.dim() != 3 or given.size(2) != width:
                if name == "x":
                    letters = "[B, T, C] with C"
                else:
                    letters = "[B, S, kdim] with kdim"
                raise ValueError(f"{name} is {list(given.shape)}, not {letters} = {width}")
            if given.dtype == expected:
                continue
            follows = expected is None or autocast_dtype(given.device.type) is not None
            if not (given.is_floating_point() and follows):
                raise ValueError(
                    f"{name} is {given.dtype}, but the attention is {expected or 'floating point'}: convert "
                    "one of the two"
                )
        if memory is not None and memory.size(0) * beam != x.size(0):
            raise ValueError(f"memory is {list(memory.shape)}, not [B, S, kdim] with B = {x.size(0) // beam}")
        if is_self and kdim != self.embed_dim:
            raise ValueError("this attention was built with kdim or vdim for a memory: give memory as well")

    def _check_cache(
        self, cache: KVCache, x: Tensor, memory: Tensor | None, mask: Tensor | None, causal: bool
    ) -> None:
        if cache.owner != self._instance:
            raise ValueError(
                "cache was made by another attention: give each layer its own cache (new_cache())"
            )
        if cache.rows not in (None, x.size(0)):
            raise ValueError(
                f"cache holds {cache.rows} sequences, but x is {list(x.shape)}: reorder the cache, or make a "
                "new one"
            )
        if memory is None:
            if not (causal or cache.holds_memory or mask is not None or x.size(1) < 2):
                raise ValueError(
                    "x has several positions, and during generation earlier positions must not see later "
                    "ones: give causal=True or a mask"
                )
        elif cache.max_length is not None:
            raise ValueError("the keys of a memory do not grow: take new_cache() without max_length")
        elif not cache.length:
            cache.of_memory(memory)
        elif not cache.is_of(memory):
            raise ValueError(
                "the cache holds keys of x or of another memory: make a new cache for this memory"
            )

    def _unread(self, name: str) -> str:
        takes = ["x", "memory", "padding", "mask", "causal", "cache", "query_padding", "with_routing"]
        if name in _ELSEWHERE:
            here = f" It is {_ELSEWHERE[name]} here."
        else:
            here = ""
        names = ", ".join([*takes, *sorted(self.reads)])
        return f"{type(self).__name__}'s call does not read {name}.{here} It takes {names}."


def _check_mask(name: str, mask: Tensor, shapes: Sequence[tuple[int, ...]], additive: bool) -> None:
    if tuple(mask.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(f"{name} is {list(mask.shape)}, not {expected}")
    if mask.dtype != torch.bool and not (additive and mask.is_floating_point()):
        if additive:
            meaning = "True = blocked, or additive float"
        else:
            meaning = "True = padding"
        raise ValueError(f"{name} is {mask.dtype}: give torch.bool, {meaning}")


def _rotary_options(common: FamilySettings) -> dict[str, Any]:
    """What `RotaryPositions` gets of the settings."""
    scaling = common.rope_scaling
    given = {
        "base": common.rope_base,
        "rotary_dim": common.rotary_dim,
        "scaling": None if scaling is None else RopeScaling.of(scaling),
    }
    return {name: value for name, value in given.items() if value is not None}


def _in_window(masks: Masks, q: Tensor, k: Tensor, window: int, first_query: int | Tensor) -> Masks:
    """Masks that also hide the keys [B, G, S, D] before a query's window.

    Args:
        first_query: the place of the first query's own key among the S.
    """
    keys = k.size(2)
    mask = masks.mask
    if mask is not None and mask.size(-1) != keys:  # it also counts the positions that a cache has dropped
        mask = mask[..., mask.size(-1) - keys :]
    if not is_compiling() and keys <= window:  # a graph is for any length
        return masks._replace(mask=mask)
    query = first_query + torch.arange(q.size(2), device=q.device)
    before = torch.arange(keys, device=q.device) <= query[:, None] - window  # [T, S]
    return masks._replace(mask=_blocked(mask, before), is_causal=False)


def _blocked(mask: Tensor | None, more: Tensor) -> Tensor:
    """The mask, additive or bool, that also blocks what is True in `more`."""
    if mask is None:
        return more
    if mask.is_floating_point():
        return mask.masked_fill(more, -torch.inf)
    return mask | more


def without_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """x with zeros for padding.

    What stands in padding may be NaN, which a weight of zero would not remove from a sum or a gradient.

    Args:
        x: [B, T, C].
        padding: [B, T] bool, True = padding, or longer, of which the last T count; None: x stays as it is.
    """
    if padding is None:
        return x
    return x.masked_fill(padding[:, padding.size(1) - x.size(1) :].unsqueeze(-1), 0.0)
