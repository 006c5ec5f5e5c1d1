"""Direct effects: what a single head or value expert of an attention adds to the output by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.switchhead import SwitchHeadAttention
from moa_fairseq.plugin.forward_context import forward_context


class Places(NamedTuple):
    """The positions of the scores in B sequences of </s> and N different symbols twice.

    The symbols are at 1 … N and again at N + 1 … 2·N.

    Args:
        tokens: the sequences, [B, 1 + 2·N].
    """

    tokens: Tensor

    @property
    def num_symbols(self) -> int:
        """N."""
        return self.tokens.size(1) // 2

    @property
    def queries(self) -> Tensor:
        """The positions of the second time but the last, after which there is no copy, [N − 1]."""
        return torch.arange(self.num_symbols + 1, 2 * self.num_symbols)

    @property
    def keys(self) -> Tensor:
        """For each query, the first position of the symbol that follows, [N − 1]."""
        return torch.arange(2, self.num_symbols + 1)


class CopyingShares(NamedTuple):
    """The share of the symbol to copy in all logits that a part raises, [B, N − 1] for each part.

    Args:
        heads: the shares of each head or slot; empty if they cannot be measured.
        value_experts: the shares of each of the H·E value experts; empty without value experts.
    """

    heads: list[Tensor]
    value_experts: list[Tensor]


def value_routing(module: nn.Module, routings: dict[str, Routing]) -> Routing | None:
    """The routing of the value experts, or None if the attention has none; only SwitchHead may have them.

    Args:
        module: an attention.
        routings: side → the routing of that side.
    """
    if not isinstance(module, SwitchHeadAttention) or "v" not in module.experts:
        return None
    return routings["queries" if module.shares_selection else "keys"]


def direct_effects(
    model: nn.Module,
    module: Attention,
    call: dict[str, Any],
    places: Places,
    routings: dict[str, Routing],
) -> CopyingShares:
    """Measure the copying of each head by passes of the module in which the other heads' results are zero.

    Args:
        model: a causal language model.
        module: one of its attentions.
        call: the keywords of the module's call.
        places: the positions of the scores.
        routings: side → the routing of this call.
    """
    decoder: Any = model.decoder
    shares = CopyingShares([], [])
    if decoder.adaptive_softmax is not None:
        return shares
    with _ablate_all_but(module, None) as head_counts:
        zero_pass = _output(module, call)  # only the biases
    if len(head_counts) != 1:  # the module attends in several parts
        return shares
    for head in range(head_counts[0]):
        with _ablate_all_but(module, head):
            effect = _output(module, call) - zero_pass
        shares.heads.append(_copying_share(decoder, effect, places))
    routing = value_routing(module, routings)
    if routing is None:
        return shares
    for expert in range(routing.num_experts):
        with _ablate_all_values_but(module, routing.expert_ids == expert):
            effect = _output(module, call) - zero_pass
        shares.value_experts.append(_copying_share(decoder, effect, places))
    return shares


def _output(module: Attention, call: dict[str, Any]) -> Tensor:
    """The output of an attention, [T, B, C], without its hooks, which called this function."""
    with forward_context(routings=()):
        output: Tensor = module.forward(**call)[0]
    return output


def _copying_share(decoder: Any, effect: Tensor, places: Places) -> Tensor:
    """The share of the symbol to copy, [B, N − 1], in all logits that an effect, [T, B, C], raises."""
    raised = _raised_logits(decoder, effect.transpose(0, 1)[:, places.queries])
    of_symbols = places.tokens[:, None, 1 : places.num_symbols + 1]
    total = raised.gather(2, of_symbols.expand(-1, raised.size(1), -1)).sum(-1)
    copied = raised.gather(2, places.tokens[:, places.keys, None])[..., 0]
    return torch.where(total > 0, copied / total, 0.0).cpu()


def _raised_logits(decoder: Any, x: Tensor) -> Tensor:
    """How far x, [B, T, C], raises each logit above the mean logit, [B, T, V]; zero for the others."""
    if isinstance(decoder.layer_norm, nn.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    gain = getattr(decoder.layer_norm, "weight", 1.0)
    bias = decoder.output_layer(torch.zeros_like(x[:1, :1]))
    logits = decoder.output_layer(x * gain) - bias
    return (logits - logits.mean(-1, keepdim=True)).relu()


@contextmanager
def _ablate_all_but(module: Attention, head: int | None) -> Iterator[list[int]]:
    """Inside the block, the results of all heads but one are zero.

    Args:
        module: the attention.
        head: the head whose results stay; None: no head.

    Yields:
        The number of heads in each call of `attend`.
    """
    head_counts: list[int] = []

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        heads, weights = type(module).attend(module, *args, **kwargs)
        head_counts.append(heads.size(1))
        results = torch.zeros_like(heads)
        if head is not None:
            results[:, head] = heads[:, head]
        return results, weights

    vars(module)["attend"] = attend
    try:
        yield head_counts
    finally:
        del vars(module)["attend"]


@contextmanager
def _ablate_all_values_but(module: Any, chosen: Tensor) -> Iterator[None]:
    """Inside the block, only the gates of the value experts in the mask `chosen` are not zero."""

    def mask_gates(projection: nn.Module, args: tuple) -> tuple:
        rows, permutation, gates, *options = args
        return rows, permutation, gates * chosen, *options

    hook = module.v_proj.register_forward_pre_hook(mask_gates)
    try:
        yield
    finally:
        hook.remove()
