"""The base class of every attention: batch first, one signature, and an error for inputs that it ignores.

Letters of shapes, here and in the other modules: B sequences of a batch, T queries, S keys, C the width of
the model, H heads, G heads of keys and values, D the width of a head, E experts, K experts that a token
selects, N = B·T tokens.
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
    """Attention whose heads may be selected or weighted for each token, as a plain module.

    A family supplies `compute`, and the cost of its projections as `projection_macs`.

    Args:
        embed_dim: the model's width, C.
        num_heads, head_dim: H and D.
        key_heads: G, the number of heads of keys and values, if it is not H.
        own_heads: the number of heads that have their own parameters, if it is not H.
        self_attention: whether keys and values are always computed from x; positions need this.
        dropout: the probability with which an attention weight is dropped, or a module whose `p` it is.
        positions: the positions inside self-attention, a name in POSITIONS_IN_ATTENTION; None: no positions.
        head_gate: the sigmoid gate on each head's output, one of HEAD_GATES.
        output_scale: a constant factor of the output. With K, gates that sum to 1 become gates that sum to K.
        common: settings, of which only the fields of `FamilySettings` are read; None: their defaults.

    Raises:
        UserError: for impossible settings.
    """

    family: ClassVar[str | None] = None  # that of its routings, for `losses_for`
    reads: frozenset[str] = frozenset()  # the keywords of the call that not every attention reads
    # The keywords of constructors that only subclasses pass
    inner_keywords = frozenset({"key_heads", "own_heads", "groups", "common"})
    # The layers that read the inputs of keys and of values
    memory_projections = ("k_proj", "v_proj")
    routes_heads = False  # whether tokens select heads; a norm over all heads is then impossible
    # Whether `compute` needs to know which expert made each key, cached ones included
    keys_by_expert = False
    can_trim_cache = True  # whether every cached number belongs to one position, and can be removed
    is_non_causal = False  # whether a result depends on later positions that no mask can hide

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
        of_keys = (self.key_heads, head_dim)
        self.positions = positions_of(positions, common, embed_dim, of_keys, self_attention)
        self.query_key_norm = query_key_norm_of(
            common, (num_heads, *of_keys), self.routes_heads, self.positions
        )
        self.window = common.window
        if self.window is not None and (not self_attention or self.window < 1):
            remedy = "give a positive number, and self_attention=True, or leave it out"
            raise UserError(f"window={self.window}: {remedy}.")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give a copy (by copy.deepcopy or pickle) its own instance number, for caches and for `name`."""
        super().__setstate__(state)
        self._instance = next(_instances)

    @property
    def name(self) -> str:
        """The path in the model, such as "encoder.layers.0.self_attn"; outside a model, class and number."""
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
        """Build the attention of a model's layer.

        Args:
            embed_dim: the model's width, C.
            settings: the settings of the family.
            num_heads: the number of heads in the model's flags, for families that have no flag of their own.
            causal: whether the layer is in a decoder, for families that need to know.
            options: further arguments of the class.
        """
        settings = settings.in_role(options.get("self_attention", False), causal)
        return cls(embed_dim, settings=settings, **options)  # type: ignore[call-arg]

    @classmethod
    def keywords(cls) -> set[str]:
        """The keywords of the constructor that are not settings."""
        bases = [base for base in cls.__mro__ if issubclass(base, Attention)]
        keywords = [inspect.getfullargspec(base).kwonlyargs for base in bases]
        return set().union(*keywords) - cls.inner_keywords

    @abc.abstractmethod
    def compute(self, call: Call) -> Computed:
        """Compute one pass.

        Args:
            call: the inputs of the pass, checked, with zeros at padding.

        Returns:
            The output [B, T, C]; if `call.need_weights` the attention weights [B, H, T, S], else None, where
            H are the active heads of a token, slot by slot; and the routings (dense attention has none).
        """

    def scaled(self, call: Call) -> Computed:
        """What `compute` returns, with the output [B, T, C] multiplied by `output_scale`."""
        out, weights, routings = self.compute(call)
        return out if self.output_scale == 1.0 else out * self.output_scale, weights, routings

    @abc.abstractmethod
    def projection_macs(self, queries: int, keys: int) -> dict[str, int]:
        """Multiply-accumulates of a sequence in "router" and "projections"; `macs` has the arguments."""

    @property
    def dropout_now(self) -> float:
        """The probability with which an attention weight is dropped now, in training or evaluation."""
        # Only fairseq's module has this attribute; `getattr` is slow if there is none
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
            x: the inputs of the queries, [B, T, C].
            memory: the inputs of keys and values in cross-attention, [B, S, kdim]. With a cache, only the
                first call reads it; it has B / beam_size rows, each for beam_size neighbouring rows of x.
            padding: padding of the inputs of keys, True = padding: [B, T], with a memory or for all cached
                positions [B, S]. The output at padding is unspecified.
            mask: [T, S] or [B, T, S], S with cached keys; additive float, or bool, True = blocked.
            causal: whether a query sees no later position.
            cache: a cache made by `new_cache`. x continues its positions and is added to it.
            query_padding: padding in cross-attention's queries, [B, T], left out of statistics and losses.
            with_routing: also return routings. (Wrappers such as torch.compile would pass on no method.)
            inputs: token_ids [B, T] of a router that selects by a hash; draw, MAE's `ExpertDraw`.

        Returns:
            The output [B, T, C]. If with_routing, a pair of it and a tuple of `Routing`: none in dense
            attention, two where keys have their own (SwitchHead; NAMOH's cross-attention), else one.

        Raises:
            ValueError, TypeError: for inputs that do not fit, or that this attention would ignore.
        """
        call = Inputs(x, memory, padding, mask, causal, cache, query_padding, inputs).call(self)
        compute = self.compute if self.output_scale == 1.0 else self.scaled  # saves a Python call
        out, _, routings = compute(call)
        return (out, routings) if with_routing else out

    def with_weights(
        self, x: Tensor, memory: Tensor | None = None, **inputs: "Unpack[Options]"
    ) -> tuple[Tensor, Tensor]:
        """What `forward` returns for these arguments, and the attention weights; its errors are the same.

        Returns:
            The output [B, T, C]; the weights [B, H, T, S] of H active heads, slot by slot if tokens select
            heads, before dropout, in float32 (float64 if x is).
        """
        more: dict[str, Any] = dict(inputs)
        causal = more.pop("causal", False)
        padding, mask, cache = [more.pop(name, None) for name in ("padding", "mask", "cache")]
        query_padding = more.pop("query_padding", None)
        call = Inputs(x, memory, padding, mask, causal, cache, query_padding, more).call(self)
        call.need_weights = True
        out, weights, _ = self.scaled(call)
        assert weights is not None
        return out, weights

    def new_cache(self, *, batch: int | None = None, max_length: int | None = None) -> KVCache:
        """Make an empty cache for one generation by this attention; one of fixed size is written in place.

        Args:
            batch, max_length: B and the number of positions of a cache of fixed size; None: it grows.

        Raises:
            UserError: for only one of the two arguments, and for an attention that cannot have such a cache.
        """
        if batch is None and max_length is None:
            return KVCache(self._instance, self.can_trim_cache, self.window and self.window - 1)
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
        """Attend with given queries, keys and values.

        Args:
            call: the pass, of which the masks, the cache and need_weights are read.
            q: queries, [B, H, T, D].
            k, v: keys and values, [B, G, S, D], where G divides H; None: the cache has them.
            masks: the masks that `place` returned with them; None: `attend` itself calls `place`.

        Returns:
            The results of the heads [B, H, T, D]; the weights [B, H, T, S] if the call needs them, else None.
        """
        bias = None
        if masks is None:
            masks = call.masks
            changes = self.positions is not None or self.query_key_norm is not None
            if changes or call.cache is not None or self.window is not None:
                q, k, v, masks, bias = self.place(call, q, k, v)
        assert k is not None and v is not None
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
        """Apply positions and norms, extend the cache, and complete the masks.

        Args:
            call: the pass; its cache is extended by the new keys and values.
            q: queries, as projected, [B, H, T, D].
            k, v: new keys and values, [B, G, S', D]; None: the cache has all of them.
            key_experts: the experts that made the new keys, [B, S', K], if `keys_by_expert`.

        Returns:
            Queries [B, H, T, D]; keys and values [B, G, S, D], cached ones included; the masks of the S keys;
            and the bias that positions add to the scaled scores, [B or 1, H or 1, T, S], or None.
        """
        cache = call.cache
        masks = call.masks
        norm = self.query_key_norm
        if k is None or v is None:  # cross-attention, which has no positions and no window
            assert cache is not None and cache.keys is not None and cache.values is not None
            if norm is not None:
                q, _ = norm(q, None)
            if masks.padding is None and cache.padding is not None:
                masks = masks._replace(padding=cache.padding)
            return q, cache.keys, cache.values, masks, None
        # The number of earlier positions, and how many of them the window has dropped
        length = dropped = 0
        if cache is not None:
            if cache.needed is not None:
                cache.slide()
            length = cache.length
            dropped = cache.dropped
        # Keys of a carried context come first. A static cache changes its length, a tensor, in place.
        first_query = length + (k.size(2) - q.size(2))
        if norm is not None and not norm.after_rotation:
            q, k = norm(q, k)
        bias = None
        if self.positions is not None:
            size = None if cache is None else cache.max_length
            num_keys = length + k.size(2) - dropped if size is None else size
            bias = self.positions.bias(q, num_keys, first_query - dropped)
            q, k = self.positions.rotate(q, k, first_query)
        if norm is not None and norm.after_rotation:
            q, k = norm(q, k)
        if cache is not None:
            cache.extend(k, v, key_experts)
            if masks.padding is not None or cache.padding is not None:
                masks = masks._replace(padding=cache.extend_padding(masks.padding))
            assert cache.keys is not None and cache.values is not None
            k = cache.keys
            v = cache.values
        if self.window is not None:
            masks = in_window(masks, q, k, self.window, first_query - dropped)
        return q, k, v, masks, bias

    def macs(self, queries: int, keys: int) -> dict[str, int]:
        """All multiply-accumulates of a sequence, in "router", "projections" and "scores" (q·kᵀ, weights·v).

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
        """The number of bytes that each token adds to the cache of a generation.

        These are keys and values of G heads: of one in MoA (Eq. 10-11; Eq. 18-20 count the projections that
        follow), of all in SwitchHead (App. A.2); if `keys_by_expert`, also expert indices of eight bytes.

        Args:
            number_bytes: the bytes of each number of a key or value; 2 is half precision.
        """
        indices = 8 * self.key_heads if self.keys_by_expert else 0
        return 2 * self.key_heads * self.head_dim * number_bytes + indices

    def restore_initialization(self) -> None:
        """Draw routers and experts again, after a model has initialised every nn.Linear (as BERT does)."""
        for child in self.children():
            reset = getattr(child, "reset_parameters", None)
            if reset is not None and not isinstance(child, nn.Linear):
                reset()
