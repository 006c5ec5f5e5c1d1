"""E linear maps in one parameter, as every mixture of this package has them."""

import math

import torch
from torch import Tensor, nn

from moa_fairseq.layers.experts import ExpertPermutation, project, resolve_backend


class ExpertLinear(nn.Module):
    """E linear maps between the width of the model, C, and that of the experts, D (see `experts.project`).

    The weight is [E, D, C] in both directions, so that for K = E a single product over E·D needs no copy.
    Each expert starts Xavier-uniform by its own widths, as in MoA's released code; biases [E, d_out] start at
    zero.

    Args:
        num_experts: E.
        d_in, d_out: the widths of inputs and outputs: C and D for maps up, D and C for maps down.
        is_up: whether the maps lead up, from C to D.
        bias: whether each expert has a bias.
        expert_backend: a choice of `--expert-backend`.
        fan_in: the number of inputs of a result, for `init_fan_in_normal_`; None: d_in. It is larger if the
            results of several experts or heads are added.
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
        """Draw the weights again, and set biases to zero."""
        bound = math.sqrt(6.0 / (self.d_in + self.d_out))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, rows: Tensor, order: ExpertPermutation, gates: Tensor | None = None, fan: int = 1
    ) -> Tensor:
        """Apply to each row the experts that its token selects.

        Args:
            rows: the inputs; up: [N, C]; down: [N·K / fan, D].
            order: the experts of the N·K slots.
            gates: the gates of the slots, [N, K]; None: all gates are 1.
            fan: the number of neighbouring slots that share a row of width D (SwitchHead: k).

        Returns:
            The results; up: [N·K / fan, D]; down: [N, C].

        Raises:
            ValueError: if `order` has another number of tokens or experts.
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
