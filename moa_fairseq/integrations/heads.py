"""MoH (arXiv 2410.11842) for the attention modules of other libraries, whose heads are weighted by hooks.

The library's module stays, with its grouped keys, positions, norms, windows, soft caps, caches and kernels.
It computes all heads, and each is multiplied by its gate before the output projection (Eq. 4).
"""

import contextlib
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.integrations import hooks
from moa_fairseq.integrations.mixture_settings import FUSED, MixtureSettings
from moa_fairseq.layers.losses import head_balance_loss
from moa_fairseq.layers.moh import MoHSettings
from moa_fairseq.layers.moh_routers import (
    SCALINGS,
    QueryNormRouter,
    SharedAndRoutedRouter,
)
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.threads import Collectors
from moa_fairseq.layers.torch_compat import full_precision

# Names of other projections: they begin with k, wk, …, or end with _k, …
_KEYS_VALUES = "w?[kv]|.*_[kv]$"
_QUERIES_KEYS_VALUES = "w?[qkv]|.*_[qkv]$"


class RouterWeight(nn.Module):
    """The learned router's linear map [N, C] → [N, E], in float32 or wider, with a bare parameter.

    An nn.Linear would be quantised with those of the model, and wrapped by adapters for "all linear layers".

    Args:
        weight: the initial value of the parameter, [E, C].
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with full_precision(x.device.type):
            return F.linear(x.to(dtype), self.weight.to(dtype))


class HeadMixture(nn.Module):
    """The router and the gates of one attention, which becomes Σ_i g_i · H^i · W_O^i (MoH Eq. 4).

    `hooks` insert it into the attention's calls. The buffer `sizes` is saved with the weights, so that a
    dense model reports an unexpected key, and a mixture of other sizes refuses them.

    Args:
        attention: the library's module, which `attach` changes, but not the constructor.
        model_dim: the width of the attention's input, C.
        num_heads: h.
        sizes: (h_s, h_s + K).
        output: the name of the attention's output projection.
        settings: the `MixtureSettings` of the model.

    Raises:
        UserError: for impossible numbers of heads, or projections that do not fit them.
    """

    sizes: Tensor

    def __init__(
        self, attention: Any, model_dim: int, num_heads: int, sizes: Any, output: str, settings: Any
    ):
        super().__init__()
        shared, active = sizes
        if not (0 <= shared < active <= num_heads or shared == active == num_heads):
            raise UserError(
                f"shared_heads {shared} and active {active} do not fit {num_heads} heads: active counts the "
                "shared heads too, and must be larger, unless all heads are shared."
            )
        self.width = _heads_width(attention, model_dim, num_heads, output, settings)
        if settings.router == "query-norm":
            self.router: nn.Module = QueryNormRouter(
                num_heads, shared, active - shared, settings.straight_through
            )
        else:
            options = MoHSettings(
                moh_scaling=settings.scaling,
                moh_shared_heads=shared,
                experts_per_token=active - shared,
            )
            learned = SharedAndRoutedRouter(model_dim, num_heads, options)
            learned.projection = RouterWeight(learned.projection.weight)  # type: ignore[assignment]
            self.router = learned
        self.num_heads = num_heads
        self.output = output
        self.queries = settings.queries
        self.saved_sizes = (shared, active, SCALINGS.index(settings.scaling))
        # float32, because averaging checkpoints truncates integers
        self.register_buffer("sizes", torch.tensor(self.saved_sizes, dtype=torch.float32))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(f"{prefix}sizes")
        if (
            saved is not None
            and not saved.is_meta
            and tuple(saved.float().round().tolist()) != self.saved_sizes
        ):
            raise UserError(
                f"{prefix[:-1]} was saved with shared_heads, active and place of scaling in {SCALINGS} = "
                f"{saved.tolist()}, but has {[*self.saved_sizes]}: call to_mixture_of_heads with what was "
                "saved."
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def attach(self, attention: nn.Module) -> None:
        """Make this a submodule of the attention, and register the hooks."""
        attention.mixture = self
        self.train(attention.training)
        hooks.attach(attention)

    def route(self, call: hooks.Call, x: Tensor) -> None:
        """Select the heads of a call by its input x [..., C], or its queries [..., h·D]."""
        routing = self.router(x)
        call.gates = routing.gates_by_expert
        lost = self.training and not torch.is_grad_enabled()
        backward = _backward_id()
        for collector in _COLLECTORS.around():
            # Gradient checkpointing runs this again in the backward pass; the routing is collected already
            if backward is None or collector.backward in (None, backward):
                collector.add((self, routing, lost))


def _heads_width(
    attention: Any, model_dim: int, num_heads: int, output: str, settings: MixtureSettings
) -> int:
    """Check the attention's projections. Returns H·D, the width of what its output projection reads."""
    kind = type(attention).__name__
    inner_norms = [
        name
        for name, module in attention.named_children()
        if "Norm" in type(module).__name__ and name[0] not in "qkv"
    ]
    if inner_norms or kind.startswith(("BitNet", "DiffLlama")):
        raise UserError(
            f"{kind} changes its heads before {output} ({', '.join(inner_norms) or 'by pairs'}), so "
            "that what a gate would weight there is no head: leave such a model dense."
        )
    projection = getattr(attention, output)
    # Conv1D has no in_features and out_features
    shape = getattr(getattr(projection, "weight", None), "shape", (0, 0))
    width: int = getattr(projection, "in_features", shape[0])
    out_width = getattr(projection, "out_features", shape[-1])
    is_input = re.match(_QUERIES_KEYS_VALUES, output, re.I)
    if settings.output and (is_input or out_width != model_dim):
        raise UserError(
            f"output={output!r} does not fit: in {kind} it maps no heads to {model_dim} values. Name "
            "what does, or leave it out."
        )
    if not width or width % num_heads:
        raise UserError(f"{kind}.{output} reads {width} values, no multiple of {num_heads} heads.")
    if settings.router == "query-norm":
        queries = settings.queries
        projection = getattr(attention, queries, None)
        needed = 3 * width if queries == FUSED else width
        is_other = queries == output or re.match(_KEYS_VALUES, queries, re.I)
        if is_other or getattr(projection, "out_features", None) != needed:
            raise UserError(
                f"queries={queries!r} does not fit: {kind} has no such projection to queries, {width} wide. "
                'Give its name, or take router="learned".'
            )
    return width


def install(
    attentions: Sequence[tuple[Any, str, int, int]], settings: MixtureSettings, dtype: Any
) -> None:
    """Add a mixture to each attention of a model.

    Args:
        attentions: by depth, tuples of an attention, the name of its output projection, C and h.
        settings: the settings of all mixtures.
        dtype: the dtype of the routers' parameters; their device is that of the output projection.

    Raises:
        UserError: for an attention that cannot be a mixture; then no attention is changed.
    """
    mixtures = []
    count = len(attentions)
    by_layer: Any = settings.layers or [(settings.shared_heads, settings.active)] * count
    if len(by_layer) != count:
        raise UserError(
            f"layers={by_layer} does not fit: give {count} entries, one for each attention."
        )
    for (attention, output, width, heads), sizes in zip(attentions, by_layer):
        if sizes is not None:
            mixture = HeadMixture(attention, width, heads, sizes, output, settings)
            device = getattr(attention, output).weight.device
            mixtures.append((attention, mixture.to(device, dtype)))
    for attention, mixture in mixtures:
        mixture.attach(attention)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # graphs compiled before would not call the hooks


_COLLECTORS = Collectors("mixtures of heads")
_adding = threading.Lock()


def _backward_id() -> int | None:
    """The id of the backward pass that runs in this thread; -1: none; None: torch.compile cannot know."""
    if torch.compiler.is_dynamo_compiling():
        return None
    return torch._C._current_graph_task_id()


class _Collector:
    """Records (mixture, routing, whether its gradient is lost) of the passes in a block."""

    def __init__(self) -> None:
        self.backward = _backward_id()
        # A linked list (record, earlier records): torch.compile would guard the length of a list, and compile
        # again for each length
        self.last: Any = None

    def add(self, record: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.last = (record, self.last)
        else:
            with _adding:
                # The passes of one block may run in several threads
                self.last = (record, self.last)


@contextlib.contextmanager
def collect_routings(model: nn.Module) -> Iterator[list[Routing]]:
    """A block that collects routings: at its end the list has those of its forward passes, by pass and depth.

    A routing that gradient checkpointing computes again is collected only by a block that is also opened
    again. Blocks may be nested; each collects all routings. The passes are those of the block's thread and
    asyncio task, and of threads in a copy of its context (`Collectors`). Routings of simultaneous passes are
    mixed.

    Args:
        model: a model with mixtures. A mixture in which every head is shared has no routings.

    Raises:
        UserError: if a balance loss would have no gradient: the block was opened with gradients, but a pass
            in training mode ran without, by gradient checkpointing with use_reentrant=True or torch.no_grad.
    """
    mixtures = [m for m in model.modules() if isinstance(m, HeadMixture) and m.router.routed_heads]
    routings: list[Routing] = []
    collector = _Collector()
    differentiates = torch.is_grad_enabled()
    lost = False
    try:
        with _COLLECTORS.block(collector):
            yield routings
    finally:
        link = collector.last
        while link:  # the latest record first
            (mixture, routing, without_gradient), link = link
            if mixture in mixtures:
                routings.insert(0, routing)
                lost = lost or (without_gradient and differentiates)
    if lost:
        raise UserError(
            "A pass in training mode ran without gradients inside a block of collect_routings, whose balance "
            "loss would have none. If a checkpoint with use_reentrant=True ran it, give "
            'gradient_checkpointing_kwargs={"use_reentrant": False}, to timm (1.0.31) no '
            "TIMM_REENTRANT_CKPT, or leave the loss out (balance=0). If it was inside torch.no_grad, open "
            "the block inside that, or call model.eval() before the pass."
        )


def balance_loss(
    routings: Sequence[Routing], mask: Tensor | None = None, device: torch.device | None = None
) -> Tensor:
    """The sum over layers of L_b = Σ_i P_i · f_i (MoH Eq. 7-8), over the tokens that are not padding.

    Args:
        routings: the routings of B·T tokens each, which may be on several devices.
        mask: the attention mask [B, T], 0 = padding. None or another shape: no token is padding.
        device: the device of the result (default: that of the last routing).

    Returns:
        A scalar, not multiplied by β.

    Raises:
        UserError: if there are no routings.
    """
    if not routings:
        raise UserError(
            "No routings: let the block of collect_routings end first, and the model choose in its thread."
        )
    padding = None if mask is None or mask.dim() != 2 else mask.reshape(-1) == 0
    total = torch.zeros((), device=device or routings[-1].probs.device)
    for routing in routings:
        if padding is not None and padding.numel() == routing.probs.size(0):
            routing = replace(routing, padding=padding.to(routing.probs.device))
        total = total + head_balance_loss(routing).to(total.device)
    return total
