"""E linear maps in one parameter: the weights under every mixture of this package."""

import math
from typing import Optional

import torch
from torch import Tensor, nn

from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.kernels import project, resolve_backend


class ExpertLinear(nn.Module):
    """E linear maps from d_in to d_out; `kernels.project` applies them.

    into "experts": d_in is the model's width C, d_out the experts' D; into "model": the reverse. weight is
    [E, D, C] in either case, so both directions are one GEMM over E·D without a copy when K = E. Each
    expert is Xavier-uniform by its own d_in and d_out, as in MoA's released code; biases [E, d_out] start
    at zero. fan_in: of how many inputs a result is made, for other initialisations; d_in, unless the results
    of several experts or heads are added up.
    """

    def __init__(
        self,
        num_experts: int,
        d_in: int,
        d_out: int,
        into: str = "experts",
        bias: bool = False,
        backend: str = "auto",
        fan_in: Optional[int] = None,
    ):
        super().__init__()
        self.num_experts, self.d_in, self.d_out, self.into = num_experts, d_in, d_out, into
        self.backend, self.fan_in = resolve_backend(backend), fan_in or d_in
        expert_dim, model_dim = (d_out, d_in) if into == "experts" else (d_in, d_out)
        self.weight = nn.Parameter(torch.empty(num_experts, expert_dim, model_dim))
        self.bias = nn.Parameter(torch.empty(num_experts, d_out)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = math.sqrt(6.0 / (self.d_in + self.d_out))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        rows: Tensor,
        decision: RoutingDecision,
        slots_per_row: int,
        slots_per_sum: int,
        gate: Optional[Tensor] = None,
    ) -> Tensor:
        """Rows [S / slots_per_row, d_in] through the experts that `decision` chose for the S slots.

        gate [S] or [N, K] → [S / slots_per_sum, d_out]. Raises ValueError if the decision was made for
        another number of rows.
        """
        return project(
            rows,
            decision.slot_order,
            self.weight,
            into=self.into,
            slots_per_row=slots_per_row,
            slots_per_sum=slots_per_sum,
            gate=gate,
            bias=self.bias,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        bias: Optional[Tensor] = self.bias
        return f"{self.num_experts} × ({self.d_in} → {self.d_out}), into {self.into}, bias={bias is not None}"
