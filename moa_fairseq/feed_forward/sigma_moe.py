"""sigma-MoE (arXiv 2310.10837): a feed-forward of experts with sigmoid gates, SwitchAll's second half."""

import itertools
from dataclasses import dataclass
from typing import Callable, Dict, Optional

from torch import Tensor, nn

from moa_fairseq.attention.base import flag
from moa_fairseq.attention.collector import padding_of_queries, record
from moa_fairseq.attention.expert_linear import ExpertLinear
from moa_fairseq.attention.initialization import draw_by_fan_in
from moa_fairseq.attention.sigmoid_router import SigmoidTopKRouter
from moa_fairseq.errors import UserError

_unnamed = itertools.count(1)


@dataclass
class SigmaMoESettings:
    """The flags of `SigmaMoE`."""

    sigma_moe_num_experts: int = flag(
        0, "experts of every feed-forward (sigma-MoE); 0: an ordinary feed-forward"
    )
    sigma_moe_experts_per_token: int = flag(4, "feed-forward experts that a token chooses")
    sigma_moe_expert_dim: int = flag(128, "inner units of a feed-forward expert")
    sigma_moe_expert_dropout: float = flag(
        0.0, "probability with which each feed-forward expert is unavailable to a token in training"
    )

    def build(self, embed_dim: int, activation: Callable[[Tensor], Tensor], backend: str) -> "SigmaMoE":
        """The feed-forward of a layer of width embed_dim. Raises UserError for impossible sizes."""
        return SigmaMoE(
            embed_dim,
            self.sigma_moe_num_experts,
            self.sigma_moe_experts_per_token,
            self.sigma_moe_expert_dim,
            self.sigma_moe_expert_dropout,
            activation,
            backend,
        )


class SigmaMoE(nn.Module):
    """y = Σ_{e ∈ E_x} s[e] · W_2^e · act(W_1^e x), E_x = argtopk(s, K), s = σ(W_3 x) (σ-MoE §5).

    x [T, B, C] → [T, B, C]. activation: of the inner units. Its decisions are handed to `record` under
    `name`; the balance loss is the one that training chose (in the paper: "entropy"). No biases. Inner units
    of all K experts are kept for the backward pass, [T·B·K, D], and nothing of width C per expert.
    """

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        experts_per_token: int,
        expert_dim: int,
        expert_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = nn.functional.relu,
        backend: str = "auto",
    ):
        super().__init__()
        if num_experts < 1:
            raise UserError(
                f"--sigma-moe-num-experts {num_experts} must be a positive number, or 0 for an ordinary "
                "feed-forward."
            )
        if expert_dim < 1:
            raise UserError(f"--sigma-moe-expert-dim must be a positive number, not {expert_dim}.")
        self.name = f"feed_forward{next(_unnamed)}"
        self.embed_dim, self.activation = embed_dim, activation
        self.experts_per_token = experts_per_token
        self.router = SigmoidTopKRouter(
            embed_dim,
            num_experts,
            experts_per_token,
            expert_dropout=expert_dropout,
            flags="sigma-moe-",
        )
        self.up = ExpertLinear(num_experts, embed_dim, expert_dim, "experts", backend=backend)
        inner = num_experts * expert_dim
        self.down = ExpertLinear(num_experts, expert_dim, embed_dim, "model", backend=backend, fan_in=inner)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, as for one feed-forward of E·D inner units."""
        draw_by_fan_in(self)

    def restore_initialization(self) -> None:
        """As `reset_parameters`, for models that initialise every nn.Linear anew, as BERT does."""
        self.reset_parameters()

    def forward(self, x: Tensor, padding: Optional[Tensor] = None) -> Tensor:
        """x [T, B, C]; padding [B, T] (True = padding) defaults to what `query_padding` declared."""
        tgt_len, batch, _ = x.shape
        padding = padding_of_queries(padding, None, batch, tgt_len)
        rows = x.reshape(-1, self.embed_dim)  # [T, B, C] → [N, C]
        if padding is not None:
            padding = padding.t().reshape(-1)
            rows = rows.masked_fill(
                padding.unsqueeze(-1), 0.0
            )  # NaN there would reach every weight's gradient
        decision = self.router(rows, padding)
        record(self.name, decision)
        inner = self.activation(self.up(rows, decision, self.experts_per_token, slots_per_sum=1))
        out = self.down(inner, decision, 1, self.experts_per_token, gate=decision.gate)
        return out.view(tgt_len, batch, self.embed_dim)

    def macs(self, tokens: int) -> Dict[str, int]:
        """Multiply-accumulates of so many tokens, by part: "router" and "projections"."""
        chosen = self.experts_per_token * (self.up.d_out + self.down.d_in)
        return {
            "router": tokens * self.router.projection.weight.numel(),
            "projections": tokens * self.embed_dim * chosen,
        }
