"""E linear maps in one parameter: the weights under every mixture of this package."""

import math

import torch
from torch import Tensor, nn

from moa_fairseq.layers.experts import ExpertPermutation, project, resolve_backend


class ExpertLinear(nn.Module):
    """E linear maps between the model's width C and the experts' width D (`experts.project` has the sums).

    weight is [E, D, C] in either direction, so both are one product over E·D without a copy when K = E. Each
    expert is Xavier-uniform by its own widths, as in MoA's released code; biases [E, d_out] start at zero.

    Args:
        num_experts: E.
        d_in, d_out: the widths; C and D of maps up, D and C of maps down.
        is_up: the direction.
        bias: whether each expert has one.
        expert_backend: a choice of `--expert-backend`.
        fan_in: of how many inputs a result is made, for other initialisations; d_in, unless the results of
            several experts or heads are added up.
    """

    def __init__(
        self,
        num_experts: int,
        d_in: int,
        d_out: int,
        is_up: bool = True,
        bias: bool = False,
        expert_backend: str = "auto",
        fan_in: int | None = None,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.d_in = d_in
        self.d_out = d_out
        self.is_up = is_up
        self.backend = resolve_backend(expert_backend)
        self.fan_in = fan_in or d_in
        if is_up:
            expert_dim = d_out
            model_dim = d_in
        else:
            expert_dim = d_in
            model_dim = d_out
        self.weight = nn.Parameter(torch.empty(num_experts, expert_dim, model_dim))
        self.bias = nn.Parameter(torch.empty(num_experts, d_out)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        bound = math.sqrt(6.0 / (self.d_in + self.d_out))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, rows: Tensor, order: ExpertPermutation, gates: Tensor | None = None, fan: int = 1
    ) -> Tensor:
        """Rows through the experts that their tokens chose.

        Args:
            rows: up: [N, C]; down: [N·K / fan, D].
            order: the experts of the N·K slots.
            gates: their weights, [N, K], or None for ones.
            fan: how many neighbouring slots share a row of the experts' width (SwitchHead: k).

        Returns:
            Up: [N·K / fan, D]; down: [N, C].

        Raises:
            ValueError: if `order` is of another number of tokens or experts.
        """
        return project(
            rows,
            self.weight,
            order,
            is_up=self.is_up,
            gates=gates,
            fan=fan,
            bias=self.bias,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        direction = "up" if self.is_up else "down"
        return f"{self.num_experts} × ({self.d_in} → {self.d_out}), {direction}, bias={self.bias is not None}"
