"""The router of SwitchHead and sigma-MoE: sigmoids, of which the largest of each group are selected."""

import math

import torch
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.constants import every_index
from moa_fairseq.layers.routers import WideLinear
from moa_fairseq.layers.routing import Routing


@torch.no_grad()
def draw_rows_of_one_length(weight: Tensor, scale: float = 1.0) -> None:
    """Draw rows of equal lengths in random directions, so that at first no expert has larger logits.

    Args:
        weight: [E, C], written in place.
        scale: the length of every row.
    """
    weight.normal_()
    weight.mul_(scale / weight.norm(dim=1, keepdim=True))


class SigmoidTopKRouter(nn.Module):
    """s^h = σ(x·W^h), of which the k largest of each head h are selected (SwitchHead Eq. 7-8; σ-MoE §5).

    The gates are the selected s, without normalisation or noise. The router computes in float32, whatever the
    model's dtype or autocast.

    Args:
        model_dim: C.
        num_experts, experts_per_token: E and k, for each head.
        groups: H, the number of heads. Expert e of head h has the number h·E + e; slots are head by head.
        expert_dropout: δ of σ-MoE, the probability with which each expert is unavailable to a token in
            training.
        side, auxiliary, family: those of the `Routing`.
        prefix: the prefix of settings' names in errors.

    Raises:
        UserError: unless 1 ≤ k ≤ E and 0 ≤ expert_dropout < 1.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        experts_per_token: int,
        groups: int = 1,
        expert_dropout: float = 0.0,
        side: str = "queries",
        auxiliary: bool = True,
        prefix: str = "",
        family: str | None = None,
    ):
        super().__init__()
        self.family = family
        if not 1 <= experts_per_token <= num_experts:
            raise UserError(
                f"{prefix}experts_per_token {experts_per_token} must be between 1 and {prefix}num_experts "
                f"{num_experts}: give at most the number of experts."
            )
        if not 0 <= expert_dropout < 1:
            raise UserError(
                f"{prefix}expert_dropout {expert_dropout} must be at least 0 and below 1."
            )
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.groups = groups
        self.expert_dropout = expert_dropout
        self.side = side
        self.auxiliary = auxiliary
        self.projection = WideLinear(model_dim, groups * num_experts, copies=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw_rows_of_one_length(self.projection.weight)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Routing:
        """Route tokens.

        Args:
            x: [N, C] or [B, T, C].
            padding: [N] or [B, T] bool, True = padding, whose gates become zero.

        Returns:
            The routing of N tokens, with H·k slots each.
        """
        x = x.reshape(-1, x.size(-1))
        tokens = x.size(0)
        logits = self.projection(x)
        # An adapter on the projection may return half precision
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        probs = torch.sigmoid(logits)
        gate = probs.view(tokens, self.groups, self.num_experts)  # [N, H·E] → [N, H, E]
        # In the order of the sigmoids, which saturate and tie
        choice = logits.detach().view_as(gate)
        if self.training and self.expert_dropout:
            dropped = torch.rand_like(choice) < self.expert_dropout
            gate = gate.masked_fill(dropped, 0.0)
            choice = choice.masked_fill(dropped, -math.inf)
        if self.experts_per_token < self.num_experts:
            chosen = choice.topk(self.experts_per_token, dim=-1).indices
            gate = gate.gather(-1, chosen)
        else:
            chosen = every_index(self.num_experts, device=x.device).expand_as(gate)
        if self.groups > 1:
            # [H, 1]
            first = every_index(self.groups, device=x.device).unsqueeze(1) * self.num_experts
            chosen = chosen + first
        expert_ids = chosen.flatten(1)  # [N, H, k] → [N, H·k]
        gate = gate.flatten(1)
        if padding is not None:
            padding = padding.reshape(-1)
            gate = gate.masked_fill(padding.unsqueeze(1), 0.0)
        return Routing(
            expert_ids,
            gate,
            probs,
            logits,
            self.groups * self.num_experts,
            groups=self.groups,
            side=self.side,
            padding=padding,
            auxiliary=self.auxiliary,
            family=self.family,
        )
