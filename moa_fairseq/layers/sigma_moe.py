"""sigma-MoE (arXiv 2310.10837): a feed-forward of experts with sigmoid gates, SwitchAll's second half."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.expert_linear import ExpertLinear
from moa_fairseq.layers.initialization import init_fan_in_normal_
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.settings import flag
from moa_fairseq.layers.sigmoid_router import SigmoidTopKRouter


@dataclass
class SigmaMoESettings:
    """The flags of `SigmaMoE`."""

    sigma_moe_num_experts: int = flag(
        0, "experts per feed-forward block (sigma-MoE); 0: an ordinary feed-forward block"
    )
    sigma_moe_experts_per_token: int = flag(4, "feed-forward experts selected per token")
    sigma_moe_expert_dim: int = flag(128, "inner units per feed-forward expert")
    sigma_moe_expert_dropout: float = flag(
        0.0,
        "probability that a feed-forward expert is unavailable to a token in training (expert dropout)",
    )


class SigmaMoE(nn.Module):
    """y = Σ_{e ∈ E_x} s[e] · W_2^e · act(W_1^e x), E_x = argtopk(s, K), s = σ(W_3 x) (σ-MoE §5).

    The training selects the balance loss (in the paper: "entropy"). There are no biases. For the backward
    pass the inner units of the K experts are kept, [N·K, D], but nothing of width C for each expert.

    Args:
        embed_dim: the model's width, C.
        settings: the settings of the experts.
        activation: act, the activation of the inner units.
        expert_backend: a choice of `--expert-backend`.

    Raises:
        UserError: for impossible sizes.
    """

    family = "sigma-MoE"

    def __init__(
        self,
        embed_dim: int,
        settings: SigmaMoESettings,
        activation: Callable[[Tensor], Tensor] = nn.functional.relu,
        expert_backend: str = "auto",
    ):
        super().__init__()
        num_experts = settings.sigma_moe_num_experts
        expert_dim = settings.sigma_moe_expert_dim
        if num_experts < 1:
            raise UserError(
                f"sigma_moe_num_experts is {num_experts}: give a positive number, or 0 for an ordinary "
                "feed-forward block."
            )
        if expert_dim < 1:
            raise UserError(f"sigma_moe_expert_dim is {expert_dim}: give a positive number.")
        self.name = type(self).__name__  # replaced by the path in a model
        self.embed_dim = embed_dim
        self.activation = activation
        self.experts_per_token = settings.sigma_moe_experts_per_token
        self.router = SigmoidTopKRouter(
            embed_dim,
            num_experts,
            self.experts_per_token,
            expert_dropout=settings.sigma_moe_expert_dropout,
            prefix="sigma_moe_",
            family=self.family,
        )
        inner = num_experts * expert_dim
        self.up = ExpertLinear(num_experts, embed_dim, expert_dim, True, False, expert_backend)
        self.down = ExpertLinear(
            num_experts, expert_dim, embed_dim, False, False, expert_backend, inner
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw normal weights, as for one feed-forward block with E·D inner units."""
        init_fan_in_normal_(self)

    def restore_initialization(self) -> None:
        """Call `reset_parameters`, after a model has initialised every nn.Linear (as BERT does)."""
        self.reset_parameters()

    def forward(
        self, x: Tensor, padding: Tensor | None = None, with_routing: bool = False
    ) -> Tensor | tuple[Tensor, tuple[Routing, ...]]:
        """Apply the experts token by token.

        Args:
            x: inputs, [B, T, C], or any other two dimensions before C.
            padding: [B, T] bool, True = padding, where the output is zero; losses and statistics leave it
                out.
            with_routing: whether to return the routing, too, as an attention does.

        Returns:
            The output [B, T, C]; if with_routing, a pair of it and a tuple with one `Routing`.
        """
        rows = x.reshape(-1, self.embed_dim)  # [B, T, C] → [N, C]
        if padding is not None:
            padding = padding.reshape(-1)
            # A NaN there would reach the gradient of every weight
            rows = rows.masked_fill(padding.unsqueeze(-1), 0.0)
        routing = self.router(rows, padding)
        order = routing.order()
        inner = self.activation(self.up(rows, order))
        out = self.down(inner, order, routing.gates).view(x.shape)
        return (out, (routing,)) if with_routing else out

    def macs(self, tokens: int) -> dict[str, int]:
        """Multiply-accumulates for `tokens` tokens, in "router" and "projections"."""
        chosen = self.experts_per_token * (self.up.d_out + self.down.d_in)
        return {
            "router": tokens * self.router.projection.weight.numel(),
            "projections": tokens * self.embed_dim * chosen,
        }
