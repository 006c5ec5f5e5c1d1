"""E linear maps in one parameter: the primitive under every mixture of this package."""

import math
from typing import Optional

import torch
from torch import Tensor, nn

from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.kernels import expert_bank


class ExpertLinear(nn.Module):
    """E linear maps from d_in to d_out, applied in one of two directions.

    "dispatch": each token's vector through each of its K experts, [N, d_in] → [N, K, d_out].
    "combine":  each token's K slots through their experts, added gate-weighted, [N, K, d_in] → [N, d_out].

    weight is stored [E, D, C], C the model's side (d_in of a dispatch, d_out of a combine) and D the
    expert's: both directions then are one GEMM over E·D without a copy when K = E. Each expert is
    Xavier-uniform by its own d_in and d_out, as in MoA's released code; biases [E, d_out] start at zero.
    """

    def __init__(
        self,
        num_experts: int,
        d_in: int,
        d_out: int,
        direction: str = "dispatch",
        bias: bool = False,
        backend: str = "auto",
    ):
        super().__init__()
        if direction not in ("dispatch", "combine"):
            raise ValueError(f"direction must be 'dispatch' or 'combine', not {direction!r}")
        self.num_experts, self.d_in, self.d_out, self.direction = num_experts, d_in, d_out, direction
        self.backend = expert_bank.resolve_backend(backend)
        expert_dim, model_dim = (d_out, d_in) if direction == "dispatch" else (d_in, d_out)
        self.weight = nn.Parameter(torch.empty(num_experts, expert_dim, model_dim))
        self.bias = nn.Parameter(torch.empty(num_experts, d_out)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = math.sqrt(6.0 / (self.d_in + self.d_out))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, decision: RoutingDecision) -> Tensor:
        """Apply the experts that `decision` chose; shapes as in the class docstring.

        Raises ValueError if the decision was made for another number of tokens.
        """
        if x.size(0) != decision.expert_index.size(0):
            raise ValueError(f"{x.size(0)} rows but a decision about {decision.expert_index.size(0)} tokens")
        order = None if self.backend == "reference" else decision.slot_order
        if self.direction == "dispatch":
            return expert_bank.dispatch(x, decision.expert_index, order, self.weight, self.bias, self.backend)
        return expert_bank.combine(
            x, decision.expert_index, decision.gate, order, self.weight, self.bias, self.backend
        )

    def extra_repr(self) -> str:
        bias: Optional[Tensor] = self.bias
        return f"{self.num_experts} × ({self.d_in} → {self.d_out}), {self.direction}, bias={bias is not None}"
