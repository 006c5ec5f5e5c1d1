"""MoH's routers: some heads are always active, and K of the others are selected (arXiv 2410.11842)."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.constants import every_index
from moa_fairseq.layers.routers import WideLinear
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.token_hash import TokenHash
from moa_fairseq.layers.torch_compat import full_precision

if TYPE_CHECKING:
    from moa_fairseq.layers.moh import MoHSettings

CHOICES = ("learned", "frozen", "hash")
SCALINGS = ("paper", "released")
STRAIGHT_THROUGH = ("routed", "chosen")
_INIT_STD = 0.02
_LEAST_DEVIATION = 0.01  # the smallest divisor of the norms of queries, as a share of their mean


class _Heads(NamedTuple):
    """What a router computes for n of the heads."""

    gates: Tensor  # [N, n]; for routed heads [N, K], of the selected ones
    probs: Tensor  # [N, n]
    logits: Tensor  # [N, n]


class _Router(nn.Module):
    """What both routers share: sizes, the selection of K routed heads, and the `Routing` that they return.

    Raises UserError unless every head can be active for some token, and each token has an active head.
    """

    # True: `forward` takes the queries of all heads instead of the attention's input
    reads_queries = False
    straight_through = ""  # one of STRAIGHT_THROUGH if gates are 1 or 0

    def __init__(self, num_heads: int, shared_heads: int, routed_per_token: int):
        super().__init__()
        if not 0 <= shared_heads <= num_heads:
            raise UserError(
                f"moh_shared_heads {shared_heads} must be between 0 and the number of attention heads, "
                f"{num_heads}."
            )
        routed = num_heads - shared_heads
        if not (1 <= routed_per_token <= routed or routed_per_token == routed == 0):
            raise UserError(
                f"experts_per_token {routed_per_token} must be between {min(1, routed)} and {routed}: of "
                f"{num_heads} attention heads moh_shared_heads {shared_heads} are always active, and the "
                f"router selects among the other {routed}."
            )
        self.token_hash: TokenHash | None = None  # selects heads instead of the logits
        self.num_heads = num_heads
        self.shared_heads = shared_heads
        self.routed_heads = routed
        self.routed_per_token = routed_per_token

    def _top_heads(
        self, logits: Tensor, probs: Tensor, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Select K routed heads for each token.

        Args:
            logits: [N, routed heads]. The K largest are selected, because probabilities may underflow and
                tie.
            probs: the probabilities of these logits.
            token_ids: [N] or [B, T], for `token_hash`, which selects instead.

        Returns:
            The probabilities of the selected heads, and the heads, both [N, K]; if all are selected, the
            heads are in their order.
        """
        if self.routed_per_token == self.routed_heads:
            return probs, every_index(self.routed_heads, device=probs.device).expand(
                probs.size(0), -1
            )
        if self.token_hash is None:
            index = logits.detach().topk(self.routed_per_token, dim=-1).indices
        else:
            index = self.token_hash(token_ids)
        return probs.gather(-1, index), index

    def _routing(
        self, shared: _Heads, routed: _Heads, routed_index: Tensor, padding: Tensor | None
    ) -> Routing:
        """The routing of N tokens: in the first slots the shared heads, then the selected ones.

        Args:
            shared, routed: what was computed for the shared and for the routed heads.
            routed_index: the selected heads, [N, K], counted from the first routed head.
            padding: [N] or [B, T] bool, True = padding, whose gates become zero.
        """
        every = every_index(self.shared_heads, device=routed_index.device)
        shared_index = every.expand(routed_index.size(0), -1)
        gate = torch.cat([shared.gates, routed.gates], 1)
        if padding is not None:
            padding = padding.reshape(-1)
            gate = gate.masked_fill(padding.unsqueeze(1), 0.0)
        return Routing(
            torch.cat([shared_index, routed_index + self.shared_heads], 1),
            gate,
            torch.cat([shared.probs, routed.probs], 1),
            torch.cat([shared.logits, routed.logits], 1),
            self.num_heads,
            # Without routed heads all heads count as routed, so that losses and statistics see an even load
            shared=self.shared_heads if self.routed_heads else 0,
            padding=padding,
            straight_through=self.straight_through == "routed",
            family="MoH",
        )


class SharedAndRoutedRouter(_Router):
    """Two-stage routing (MoH Eq. 5-6): gates α1·softmax(W_s x) of shared heads, α2·softmax(W_r x) of routed.

    [α1, α2] = softmax(W_h x). Of the h − h_s routed heads the K with the largest W_r x are selected. One
    shared head needs no W_s; without shared heads, or without routed ones, there is no W_h, and α is 1 (in
    the released code 2 · 1/2). The router computes in float32, whatever the model's dtype or autocast.

    Args:
        model_dim: C, the width of the model.
        num_heads: h.
        settings: the settings of the layer. The router reads these:
            moh_shared_heads, experts_per_token: h_s and K.
            moh_scaling: "paper": as above, so the gates of a token add up to at most 1. "released": as the
                authors' code, which divides the selected routed gates by their sum and multiplies them by K,
                and uses h_s·softmax(W_s x) and 2·[α1, α2]; with even logits every gate is 1.
            router_choice: "learned"; "frozen": W_r, W_s and W_h keep their random values; "hash": the token's
                id selects the routed heads (`TokenHash`), with learned gates.

    Raises:
        UserError: for impossible sizes and unknown names.
    """

    def __init__(self, model_dim: int, num_heads: int, settings: "MoHSettings"):
        shared_heads = settings.moh_shared_heads
        choice = settings.router_choice
        super().__init__(num_heads, shared_heads, settings.experts_per_token)
        check_choice("router_choice", choice, CHOICES)
        check_choice("moh_scaling", settings.moh_scaling, SCALINGS)
        self.scaling = settings.moh_scaling
        self.two_stages = shared_heads > 0 and self.routed_heads > 0
        # W_r, W_s and W_h are one matrix; these are their numbers of rows
        self.row_counts = (
            self.routed_heads,
            shared_heads if shared_heads > 1 else 0,
            2 * self.two_stages,
        )
        self.projection = WideLinear(model_dim, sum(self.row_counts), copies=True)
        if choice == "frozen":
            self.projection.requires_grad_(False)
        elif choice == "hash":
            self.token_hash = TokenHash(self.routed_heads, self.routed_per_token)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small random weights: with zeros every token would select the same heads."""
        nn.init.normal_(self.projection.weight, std=_INIT_STD)
        if self.token_hash is not None:
            self.token_hash.reset_parameters()

    def forward(
        self, x: Tensor, padding: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        """Route tokens.

        Args:
            x: the inputs of the attention, [N, C] or [B, T, C].
            padding: [N] or [B, T] bool, True = padding, whose gates become zero.
            token_ids: [N] or [B, T] int64, for router_choice "hash".

        Returns:
            The routing of N tokens: in the first slots the shared heads, then the K selected heads.

        Raises:
            UserError: if router_choice is "hash" and token_ids is None.
        """
        x = x.reshape(-1, x.size(-1))
        released = self.scaling == "released"
        logits = self.projection(x)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logits = logits.to(dtype)  # an adapter on the projection may return half precision
        routed, shared, stage = logits.split(self.row_counts, dim=-1)
        if self.shared_heads == 1:
            shared = logits.new_zeros(logits.size(0), 1)
        shared_probs = torch.softmax(shared, -1)
        routed_probs = torch.softmax(routed, -1)
        shared_gate = shared_probs
        routed_gate, routed_index = self._top_heads(routed, routed_probs, token_ids)
        if released:
            shared_gate = self.shared_heads * shared_gate
            total = routed_gate.sum(-1, keepdim=True).clamp_min(torch.finfo(dtype).eps)
            routed_gate = self.routed_per_token * routed_gate / total
        if self.two_stages:
            alpha = torch.softmax(stage, -1) * (2 if released else 1)
            shared_gate = alpha[:, :1] * shared_gate
            routed_gate = alpha[:, 1:] * routed_gate
        return self._routing(
            _Heads(shared_gate, shared_probs, shared),
            _Heads(routed_gate, routed_probs, routed),
            routed_index,
            padding,
        )


class QueryNormRouter(_Router):
    """A router without parameters, for trained models (MoH §4.4): it compares the l2 norms of queries.

    As in the released code, which does not train, the logit of a routed head is the norm of its query,
    divided by the standard deviation of the norms over the routed heads. This divisor acts as a temperature.
    Here it has no gradient, because with two routed heads its gradient would cancel that of the norms; and it
    is at least 0.01 of the mean norm, in case all norms are equal. The K heads with the largest logits are
    selected. Gates are g^q = 1(selected) in the forward pass (Eq. 9), with the gradient of the softmax
    probability g (Eq. 10: ∂L/∂g^q = ∂L/∂g). Shared heads have the gate 1.

    Args:
        num_heads: h.
        shared_heads: h_s; the first heads are shared.
        routed_per_token: K, the number of heads that a token selects among the other h − h_s.
        straight_through: "routed": Eq. 10 for every routed head, as printed: the gate of an unselected head
            is 0, and its gradient is what the head would have contributed. "chosen": Eq. 10 for the selected
            heads alone, as if g were the score of Eq. 5, which is a constant 0 for other heads.

    Raises:
        UserError: for impossible sizes and an unknown name.
    """

    reads_queries = True

    def __init__(
        self,
        num_heads: int,
        shared_heads: int,
        routed_per_token: int,
        straight_through: str = STRAIGHT_THROUGH[0],
    ):
        super().__init__(num_heads, shared_heads, routed_per_token)
        check_choice("moh_straight_through", straight_through, STRAIGHT_THROUGH)
        self.straight_through = straight_through

    def forward(
        self, queries: Tensor, padding: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        """Route tokens by the queries of all heads.

        Args:
            queries: [N, H·D] or [B, T, H·D], before rotary positions.
            padding: [N] or [B, T] bool, True = padding, whose gates become zero.
            token_ids: not used.

        Returns:
            The routing of N tokens: in the first slots the shared heads, then the K selected heads.
        """
        queries = queries.reshape(-1, queries.size(-1))
        with full_precision(queries.device.type):
            dtype = torch.promote_types(queries.dtype, torch.float32)
            heads = queries.to(dtype).unflatten(1, (self.num_heads, -1))
            logits = torch.linalg.vector_norm(heads[:, self.shared_heads :], dim=-1)
            if self.routed_heads > 1 and logits.numel():
                norms = logits.detach()
                least = (_LEAST_DEVIATION * norms.mean(-1, keepdim=True)).clamp_min(
                    torch.finfo(dtype).tiny
                )
                logits = logits / norms.std(-1, keepdim=True).maximum(least)
            probs = torch.softmax(logits, -1)
            routed_gate, routed_index = self._top_heads(logits, probs)
            routed_gate = 1.0 + (routed_gate - routed_gate.detach())
            shared_gates = logits.new_ones(logits.size(0), self.shared_heads)
            return self._routing(
                _Heads(shared_gates, shared_gates, torch.zeros_like(shared_gates)),
                _Heads(routed_gate, probs, logits),
                routed_index,
                padding,
            )
