"""The call of every attention here: batch first, one signature, nothing that it does not read.

Letters of shapes, here and in the other modules: B batch, T queries, S keys, C the model's width, H heads, G
heads of keys and values, D width of a head, E experts, K of them chosen by a token, N = B·T tokens.
"""

import abc
import inspect
import itertools
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

from torch import Tensor, nn

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.call import Call, Computed, Inputs, Options
from moa_fairseq.layers.head_gate import HEAD_GATES, HeadGate
from moa_fairseq.layers.kv_cache import KVCache
from moa_fairseq.layers.positions import positions_of
from moa_fairseq.layers.query_key_norm import query_key_norm_of
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.sdpa import Masks, attend, attend_with_weights, in_window
from moa_fairseq.layers.settings import FamilySettings
from moa_fairseq.layers.static_cache import StaticCache

if TYPE_CHECKING:
    from typing_extensions import Unpack

_instances = itertools.count()


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
    # Whether `compute` has to know which experts made keys, those of a cache included
    keys_by_expert = False
    reads: frozenset[str] = frozenset()  # further keywords of the call
    inner_keywords = frozenset({"key_heads", "own_heads", "groups", "common"})  # a family's own
    memory_projections = ("k_proj", "v_proj")  # what reads the inputs of keys and those of values
    can_trim_cache = True
    # Whether a position's result follows from later ones, which no mask hides
    is_non_causal = False
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
        self.dropout_module = dropout if isinstance(dropout, nn.Module) else nn.Dropout(dropout)
        self.head_gate: HeadGate | None = None
        if head_gate != "none":
            self.head_gate = HeadGate(embed_dim, own_heads or num_heads, head_dim, head_gate)
        sizes = (num_heads, self.key_heads, head_dim)
        self.positions = positions_of(positions, common, embed_dim, sizes[1:], self_attention)
        self.query_key_norm = query_key_norm_of(common, sizes, self.routes_heads, self.positions)
        self.window = common.window
        if self.window is not None and (not self_attention or self.window < 1):
            raise UserError(
                f"window={self.window}: give a positive number, and self_attention=True, or leave it out."
            )

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
        cls,
        embed_dim: int,
        settings: FamilySettings,
        *,
        num_heads: int,
        causal: bool,
        **options: Any,
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

    @classmethod
    def keywords(cls) -> set[str]:
        """The keywords of the constructor that are no settings."""
        names: set[str] = set()
        for base in cls.__mro__[: cls.__mro__.index(Attention) + 1]:
            for name, parameter in inspect.signature(base).parameters.items():
                if parameter.kind is parameter.KEYWORD_ONLY:
                    names.add(name)
        return names - cls.inner_keywords

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
        """What `compute` returns of a pass, its output [B, T, C] multiplied by `output_scale`."""
        out, weights, routings = self.compute(call)
        if self.output_scale != 1.0:
            out = out * self.output_scale
        return out, weights, routings

    @abc.abstractmethod
    def projection_macs(self, queries: int, keys: int) -> dict[str, int]:
        """Multiply-accumulates of one sequence, of "router" and "projections"; `macs` adds all else.

        Args:
            queries, keys: how many tokens of the sequence have queries, and how many keys.
        """

    @property
    def dropout_now(self) -> float:
        """The probability with which attention weights are dropped in this pass."""
        drops = self.training or vars(self.dropout_module).get("apply_during_inference", False)
        return float(getattr(self.dropout_module, "p", 0.0)) if drops else 0.0

    @overload
    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        with_routing: Literal[False] = False,
        **inputs: "Unpack[Options]",
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        with_routing: Literal[True],
        **inputs: "Unpack[Options]",
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
            with_routing: also return the routings. A flag: wrappers such as torch.compile pass on calls only.
            inputs: token_ids [B, T] where a router chooses by a hash; draw where MAE draws experts.

        Returns:
            [B, T, C]; with_routing: a pair of it and a tuple of `Routing`: none of dense attention, one of
            most, two where keys are routed by themselves (SwitchHead; NAMOH's cross-attention).

        Raises:
            ValueError, TypeError: for what does not fit, or would not be read.
        """
        call = Inputs(x, memory, padding, mask, causal, cache, query_padding, inputs).call(self)
        out, _, routings = self.compute(call) if self.output_scale == 1.0 else self.scaled(call)
        return (out, routings) if with_routing else out

    def with_weights(
        self, x: Tensor, memory: Tensor | None = None, **inputs: "Unpack[Options]"
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, errors included, and the attention weights.

        Args:
            x, memory, inputs: those of `forward`.

        Returns:
            The output [B, T, C]; the weights [B, H, T, S] from before the dropout, in float32 (float64 of
            float64), H being the heads that work for a token, slot by slot where they are chosen.
        """
        call = Inputs.of(x, memory, dict(inputs)).call(self)
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
        if batch is None and max_length is None:
            needed = None if self.window is None else self.window - 1
            return KVCache(self._instance, self.can_trim_cache, needed)
        if not (batch and max_length and min(batch, max_length) > 0):
            sizes = f"batch={batch}, max_length={max_length}"
            raise UserError(f"{sizes}: give two positive numbers, or none.")
        if self.can_trim_cache and not self.keys_by_expert:
            return StaticCache(self._instance, batch, max_length)
        content = "the heads that tokens chose" if self.keys_by_expert else "a sum over positions"
        raise UserError(
            f"max_length={max_length}: a cache of {type(self).__name__} also holds {content}, which has no "
            "place in a cache of one size. Take new_cache() without arguments."
        )

    def attend(
        self, call: Call, q: Tensor, k: Tensor | None, v: Tensor | None, masks: Masks | None = None
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
        length = dropped = first_query = 0
        if cache is not None and k is not None:
            if cache.needed is not None:
                cache.slide()
            length = cache.length
            dropped = cache.dropped
        if k is not None:
            first_query = length + (k.size(2) - q.size(2))  # an int; in a static cache a new tensor
        norm = self.query_key_norm
        if norm is not None and not norm.after_rotation:
            q, k = norm(q, k)
        if self.positions is not None and k is not None:
            static = None if cache is None else cache.max_length
            keys = length + k.size(2) - dropped if static is None else static
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
            masks = in_window(masks, q, k, self.window, first_query - dropped)
        return q, k, v, masks, bias

    def macs(self, queries: int, keys: int) -> dict[str, int]:
        """All multiply-accumulates of a sequence, of "router", "projections" and "scores" (q·kᵀ, weights·v).

        Args:
            queries, keys: how many tokens of the sequence have queries, and how many keys.
        """
        macs = dict(self.projection_macs(queries, keys))
        macs["scores"] = 2 * queries * keys * self.num_heads * self.head_dim
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
        indices = 8 * self.key_heads if self.keys_by_expert else 0
        return 2 * self.key_heads * self.head_dim * number_bytes + indices

    def restore_initialization(self) -> None:
        """Draw routers and experts anew, after a model has initialised every nn.Linear (as BERT does)."""
        for child in self.children():
            reset = getattr(child, "reset_parameters", None)
            if reset is not None and not isinstance(child, nn.Linear):
                reset()
