"""MAE, a mixture of attentive experts (arXiv 2005.06537): a gate weights experts, each without t heads."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.call import Call, Computed
from moa_fairseq.layers.constants import constant, every_index
from moa_fairseq.layers.dense import DenseHeadsAttention
from moa_fairseq.layers.expert_draw import random_expert
from moa_fairseq.layers.input_mean import running_mean, sequence_mean
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.sequence_gate import NORMS, SequenceGate
from moa_fairseq.layers.settings import FamilySettings, flag

GATES = ("learned", "uniform")
MIXTURE, TOP_EXPERT, RANDOM_EXPERT = EVALUATIONS = ("mixture", "top-expert", "random-expert")


@dataclass
class MAESettings(FamilySettings):
    """The flags of `MixtureOfAttentiveExperts`."""

    mae_dropped_heads: int = flag(
        1, "heads that each expert leaves out (of 8 heads, 1: MAE-7, 2: MAE-6)"
    )
    mae_gate: str = flag(
        "learned",
        "expert weights: from a gate that sees the input (learned), or all equal (uniform: UNI-MAE)",
        GATES,
    )
    gate_hidden_dim: int = flag(256, "hidden size of the gate's MLP")
    gate_dropout: float = flag(0.1, "dropout after the first layer of the gate's MLP")
    gate_window: Optional[int] = flag(  # noqa: UP045
        None, "number of latest inputs that a decoder's gate averages (translation: all so far)"
    )
    gate_norm: str = flag(
        "earlier",
        "statistics that normalise a gate's input while the gate is updated. earlier: from earlier "
        "updates, unlike the paper; batch: from the batch, as in the paper. Decoder gates always use "
        "earlier, because batch statistics would reveal later tokens. F steps and evaluation always use "
        "earlier",
        NORMS,
    )
    mae_evaluate_with: str = flag(
        MIXTURE,
        "experts in evaluation (not in training): all, weighted by the gate; each gate's most probable "
        "one; or one random expert per module. Set it for trained models by --model-overrides",
        EVALUATIONS,
    )
    mae_evaluate_seed: int = flag(1, "seed of --mae-evaluate-with random-expert")

    def check(self, attentions: Sequence[Attention]) -> None:
        mixtures = [
            attention
            for attention in attentions
            if isinstance(attention, MixtureOfAttentiveExperts)
        ]
        gates = [mixture.gate for mixture in mixtures if mixture.gate is not None]
        if (
            self.gate_norm == "batch"
            and gates
            and all(gate.norm.statistics != "batch" for gate in gates)
        ):
            raise UserError(
                "gate_norm batch is for models with an encoder, whose gates see whole sentences. All gates "
                "of this model are causal, and batch statistics would reveal later tokens to them. Leave the "
                "setting out (gate_norm earlier)."
            )


class MixtureOfAttentiveExperts(DenseHeadsAttention):
    """Σ_i g_i(X; φ) · f_i(X; θ) (MAE Eq. 6), with the parameters of dense attention and a gate.

    Expert i leaves out a set D_i of t = mae_dropped_heads of the h heads: f_i = h/(h−t) · Σ_{j ∉ D_i} H_j
    (Eq. 5 for t = 1, which is MAE-7 if h = 8; for t = 2 the 28 pairs of MAE-6). No expert is computed on its
    own: the sum over experts multiplies head j by h/(h−t) · (1 − Σ_{i: j ∈ D_i} g_i) before the output
    projection, whose bias belongs to no expert. With a draw (an F step), an expert is drawn from g, and g
    becomes its one-hot vector, so t heads are zeroed. A sequence has one expert if its gate sees the whole
    sequence; if the gate is causal, the expert can change along the sequence (see `ExpertDraw.choose`). The
    attention weights that are returned are not rescaled.

    Args:
        embed_dim: the model's width, C.
        num_heads: h.
        settings: the settings, or their fields as keywords.
            mae_gate: "learned" (a SequenceGate over the mean of the queries' inputs), or "uniform" (g = 1/E;
                the mixture is then dense attention).
            gate_norm: the statistics that normalise the gate's input while the gate learns (see GateNorm); a
                causal gate always uses "earlier".
            mae_evaluate_with: the experts in evaluation (Table 5): the mixture, the most probable expert of
                each gate, or one random expert (by mae_evaluate_seed) for all sequences.
        causal: whether each position has a gate, which sees only the latest gate_window inputs up to the
            position. Decoders need this in self- and cross-attention. Otherwise each sequence has one gate,
            which sees all of its tokens.
        options: those of `DenseHeadsAttention`.

    Raises:
        UserError: for an impossible number of heads or dropped heads.
    """

    family = "MAE"
    needs_causal = True
    reads = frozenset({"draw"})
    can_trim_cache = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        settings: MAESettings | None = None,
        *,
        causal: bool = False,
        **options: Any,
    ):
        settings = MAESettings.of(settings, options)
        dropped_heads = settings.mae_dropped_heads
        if not 1 <= dropped_heads < num_heads:
            raise UserError(
                f"mae_dropped_heads {dropped_heads} must be between 1 and {num_heads - 1}: "
                f"an expert leaves out some of the {num_heads} attention heads, but not all."
            )
        if settings.gate_window is not None and settings.gate_window < 1:
            raise UserError(
                f"gate_window {settings.gate_window} must be at least 1: the gate sees the current input."
            )
        check_choice("mae_gate", settings.mae_gate, GATES)
        check_choice("gate_norm", settings.gate_norm, NORMS)
        check_choice("mae_evaluate_with", settings.mae_evaluate_with, EVALUATIONS)
        if settings.mae_evaluate_with == TOP_EXPERT and settings.mae_gate == "uniform":
            raise UserError(
                f"mae_evaluate_with {TOP_EXPERT} needs a learned gate, but a uniform gate weights all "
                "experts equally: choose random-expert."
            )
        super().__init__(embed_dim, num_heads, **options)
        self.causal = causal
        self.gate_window = settings.gate_window
        self.evaluate_with = settings.mae_evaluate_with
        self.evaluate_seed = settings.mae_evaluate_seed
        self.dropped_heads = dropped_heads
        self.num_experts = math.comb(num_heads, dropped_heads)
        self.scale = num_heads / (num_heads - dropped_heads)
        self.gate: SequenceGate | None = None
        if settings.mae_gate == "learned":
            # a causal gate must not see later positions
            norm = settings.gate_norm
            if causal:
                norm = "earlier"
            sizes = (self.num_experts, settings.gate_hidden_dim, settings.gate_dropout)
            self.gate = SequenceGate(embed_dim, *sizes, norm)
        self.is_non_causal = self.gate is not None and not causal
        self.reset_parameters()

    def compute(self, call: Call) -> Computed:
        draw = call.draw if self.training else None
        with torch.set_grad_enabled(torch.is_grad_enabled() and draw is None):
            probs, logits, real = self.responsibilities(call)
        chosen = self.select(probs, draw)
        routing = self._routing(probs, logits, chosen, real)
        q = self.split(self.q_proj(call.x))
        k, v = self.keys_values(call)
        heads, weights = self.attend(call, q, k, v)
        if self.head_gate is not None:
            heads = self.head_gate(heads, call.x)
        heads = heads.transpose(1, 2) * self._head_weights(routing, probs.shape).to(heads.dtype)
        return self.out_proj(heads.flatten(2)), weights, (routing,)  # [B, T, H, D] → [B, T, C]

    def responsibilities(self, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gate's weights of the experts, g(X; φ) of MAE Eq. 6.

        Args:
            call: the pass. The gate averages the inputs of its queries; a causal gate keeps sums in its
                cache.

        Returns:
            g and its logits, [B, T, E] for a learned causal gate, else [B, 1, E], in float32 or wider; and
            which of the B·T or B rows are real, [N] bool, or None without padding.
        """
        x = call.x
        padding = call.query_padding
        batch, tgt_len, width = x.shape
        # Sequences without tokens do not count in the statistics of a gate
        if padding is None and not tgt_len:
            padding = x.new_zeros(batch, 0, dtype=torch.bool)
        if self.gate is None:
            wide = torch.promote_types(x.dtype, torch.float32)
            logits = x.new_zeros(batch, 1, self.num_experts, dtype=wide)
            return torch.softmax(logits, -1), logits, None if padding is None else ~padding.all(1)
        if self.causal:
            sums = None if call.cache is None else call.cache.sums
            mean = running_mean(x, padding, self.gate_window, sums)
            length = tgt_len
            real = None
            if padding is not None:
                real = ~padding.reshape(-1)
        else:
            mean = sequence_mean(x, padding)
            length = 1
            real = None
            if padding is not None:
                real = ~padding.all(1)
        probs, logits = self.gate(mean.reshape(-1, width), real)
        shape = (batch, length, self.num_experts)
        return probs.view(shape), logits.view(shape), real

    def select(self, probs: Tensor, draw: Any) -> Tensor | None:
        """Select a single expert, in an F step and in some evaluations.

        Args:
            probs: g, [B, T or 1, E].
            draw: the `expert_draw.ExpertDraw` of an F step, or None.

        Returns:
            The indices of the experts, [B, T or 1] int64; None: all experts are mixed.
        """
        if draw is not None:
            chosen: Tensor = draw.choose(self.name, probs)
            return chosen
        if self.training or self.evaluate_with == MIXTURE:
            return None
        favourite = probs.argmax(-1)
        if self.evaluate_with == RANDOM_EXPERT:
            favourite.fill_(random_expert(self.name, self.evaluate_seed, self.num_experts))
        return favourite

    def _routing(
        self, probs: Tensor, logits: Tensor, chosen: Tensor | None, real: Tensor | None
    ) -> Routing:
        scope = "sequences"
        if self.causal and self.gate is not None:
            scope = "tokens"
        probs = probs.flatten(0, 1)  # [B, T or 1, E] → [N, E]
        if chosen is None:
            expert_ids = every_index(self.num_experts, device=probs.device).expand(
                probs.size(0), -1
            )
            gates = probs
        else:
            expert_ids = chosen.reshape(-1, 1)
            gates = torch.ones_like(expert_ids, dtype=probs.dtype)
        no_row = None if real is None else ~real
        if no_row is not None:
            gates = gates.masked_fill(no_row.unsqueeze(-1), 0.0)
        flat = logits.flatten(0, 1)
        return Routing(
            expert_ids,
            gates,
            probs,
            flat,
            self.num_experts,
            scope=scope,
            padding=no_row,
            family=self.family,
        )

    def heads_of_experts(self) -> Tensor:
        """The heads of each expert, [E, h] float32: 1 where the expert has the head, else 0."""
        return 1.0 - _dropped(self.num_heads, self.dropped_heads, device=self.q_proj.weight.device)

    def _head_weights(self, routing: Routing, shape: Sequence[int]) -> Tensor:
        """The factor of each head j, h/(h−t) · (1 − Σ_{i: j ∈ D_i} g_i), as [B, T or 1, H, 1]."""
        probs = routing.probs
        dropped = _dropped(self.num_heads, self.dropped_heads, device=probs.device).to(probs.dtype)
        # [N, E] · [E, H]
        if routing.chooses_all:
            left_out = probs @ dropped
        else:
            left_out = dropped[routing.expert_ids[:, 0]]
        return self.scale * (1.0 - left_out).view(shape[0], shape[1], self.num_heads, 1)

    def projection_macs(self, queries: int, keys: int) -> dict[str, int]:
        gate = 0
        if self.gate is not None:  # it reads one mean for each sequence, or one for each position
            hidden = self.gate.fc1.out_features
            gate = (queries if self.causal else 1) * hidden * (self.embed_dim + self.num_experts)
        return super().projection_macs(queries, keys) | {"router": gate}


@constant
def _dropped(num_heads: int, dropped_heads: int, device: torch.device) -> Tensor:
    """The sets D_i of dropped heads, [E, h] float32: 1 where expert i leaves out the head, else 0."""
    subsets = list(itertools.combinations(range(num_heads), dropped_heads))
    dropped = torch.zeros(len(subsets), num_heads)
    for expert, heads in enumerate(subsets):
        dropped[expert, list(heads)] = 1.0
    return dropped.to(device)


MAESettings.attention = MixtureOfAttentiveExperts
