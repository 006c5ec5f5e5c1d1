"""MAE, a mixture of attentive experts (arXiv 2005.06537): a gate weights experts that lack t heads each."""

import itertools
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

from moa_fairseq.attention.base import FamilySettings, MixtureAttention, flag
from moa_fairseq.attention.cache import Cache
from moa_fairseq.attention.dense import DenseHeadsAttention
from moa_fairseq.attention.expert_draw import current_draw, random_expert
from moa_fairseq.attention.input_mean import running_mean, sequence_mean
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.attention.sequence_gate import NORMS, SequenceGate
from moa_fairseq.errors import UserError, check_choice

GATES = ("learned", "uniform")
MIXTURE, TOP_EXPERT, RANDOM_EXPERT = EVALUATIONS = ("mixture", "top-expert", "random-expert")


@dataclass
class MAESettings(FamilySettings):
    """The flags of `MixtureOfAttentiveExperts`."""

    mae_dropped_heads: int = flag(
        1, "heads that each expert leaves out (of 8 heads, 1 makes MAE-7 and 2 makes MAE-6)"
    )
    mae_gate: str = flag(
        "learned", "how experts are weighted: by a gate that sees the input, or all equally (UNI-MAE)", GATES
    )
    gate_hidden_dim: int = flag(256, "hidden size of the gate's MLP")
    gate_dropout: float = flag(0.1, "dropout after the first layer of the gate's MLP")
    gate_window: Optional[int] = flag(
        None, "how many of the latest inputs a decoder's gate averages (translation: all so far)"
    )
    gate_norm: str = flag(
        "earlier",
        "which statistics normalise a gate's input while the gate is updated. earlier: those of earlier "
        "updates, which is not what the paper does. batch: those of the batch, as in the paper. Gates of "
        "decoders always use earlier, because a batch's statistics would tell them about later tokens. In F "
        "steps and in evaluation all gates use earlier",
        NORMS,
    )
    mae_evaluate_with: str = flag(
        MIXTURE,
        "in evaluation (never in training): mix the experts, use only each gate's favourite, or use one "
        "random expert in each module; give it to trained models by --model-overrides",
        EVALUATIONS,
    )
    mae_evaluate_seed: int = flag(1, "seed of --mae-evaluate-with random-expert")

    def build(self, embed_dim: int, num_heads: int, causal: bool, **role: Any) -> "MixtureOfAttentiveExperts":
        own = self.arguments(
            mae_dropped_heads="dropped_heads",
            mae_gate="gate",
            mae_evaluate_with="evaluate_with",
            mae_evaluate_seed="evaluate_seed",
        )
        return MixtureOfAttentiveExperts(embed_dim, num_heads, causal=causal, **own, **role)

    def check(self, attentions: Sequence[MixtureAttention[Any]]) -> None:
        mixtures = [one for one in attentions if isinstance(one, MixtureOfAttentiveExperts)]
        gates = [mixture.gate for mixture in mixtures if mixture.gate is not None]
        if self.gate_norm == "batch" and gates and all(gate.norm.statistics != "batch" for gate in gates):
            raise UserError(
                "--gate-norm batch has no meaning for this model: all of its gates are causal, and a "
                "batch's own statistics would tell them about later tokens. Leave it out (--gate-norm "
                "earlier); it is for models with an encoder, whose gates see whole sentences."
            )


class MixtureOfAttentiveExperts(DenseHeadsAttention[RoutingDecision]):
    """Σ_i g_i(X; φ) · f_i(X; θ) (MAE Eq. 6), a drop-in for fairseq's attention with the same parameters.

    Expert i leaves out a set D_i of t = dropped_heads of the h heads: f_i = h/(h−t) · Σ_{j ∉ D_i} H_j
    (Eq. 5 for t = 1: MAE-7 of 8 heads; t = 2: the 28 pairs of MAE-6). No expert is ever built: the sum
    over experts is a rescaling of head j by h/(h−t) · (1 − Σ_{i: j ∈ D_i} g_i) before the output
    projection, whose bias belongs to no expert. Inside `drawing_experts` (an F step) g is the one-hot
    vector of an expert drawn from it, and t heads are zeroed: one expert per sequence where one gate sees
    the sequence, and one that can change along it where the gate is causal (see `ExpertDraw.choose`).
    Head weights that `forward` returns are not rescaled.

    gate: "learned" (a SequenceGate over the mean of the queries' inputs), or "uniform" (g = 1/E; mixing
    is then plain dense attention). causal: the gate at a position sees only the inputs up to it, the latest
    gate_window of them; for decoders, in self- and cross-attention, where queries are a translation's tokens.
    Otherwise one gate per sequence sees all of its tokens. gate_norm: "earlier" or "batch" (see GateNorm),
    the statistics that normalise the gate's input while the gate learns; a causal gate always uses "earlier".
    evaluate_with: outside training, a single expert instead of the mixture (Table 5): the gate's favourite,
    which can differ between sequences or positions, or a random one (of evaluate_seed), the same throughout.
    Raises UserError for an impossible number of heads or dropped heads.
    """

    dropped: Tensor  # a buffer [E, h]: 1 where an expert leaves out a head, row i being D_i

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropped_heads: int = 1,
        gate: str = "learned",
        causal: bool = False,
        gate_window: Optional[int] = None,
        gate_hidden_dim: int = 256,
        gate_dropout: float = 0.1,
        gate_norm: str = "earlier",
        evaluate_with: str = MIXTURE,
        evaluate_seed: int = 1,
        **role: Any,
    ):
        if not 1 <= dropped_heads < num_heads:
            raise UserError(
                f"--mae-dropped-heads {dropped_heads} must lie between 1 and {num_heads - 1}: "
                f"an expert leaves out some of the {num_heads} attention heads, but not all."
            )
        if gate_window is not None and gate_window < 1:
            raise UserError(
                f"--gate-window {gate_window} must be at least 1: the gate sees the current input."
            )
        check_choice("--mae-gate", gate, GATES)
        check_choice("--gate-norm", gate_norm, NORMS)
        check_choice("--mae-evaluate-with", evaluate_with, EVALUATIONS)
        if evaluate_with == TOP_EXPERT and gate == "uniform":
            raise UserError(
                f"--mae-evaluate-with {TOP_EXPERT} needs a gate that prefers experts, but a uniform one "
                "weights all equally: choose random-expert."
            )
        super().__init__(embed_dim, num_heads, **role)
        self.causal, self.gate_window = causal, gate_window
        self.evaluate_with, self.evaluate_seed = evaluate_with, evaluate_seed
        subsets = list(itertools.combinations(range(num_heads), dropped_heads))
        dropped = torch.zeros(len(subsets), num_heads)
        for expert, heads in enumerate(subsets):
            dropped[expert, list(heads)] = 1.0
        self.num_experts, self.scale = len(subsets), num_heads / (num_heads - dropped_heads)
        self.register_buffer("dropped", dropped, persistent=False)
        self.gate: Optional[SequenceGate] = None
        if gate == "learned":
            norm = "earlier" if causal else gate_norm  # a causal gate must not see later positions
            self.gate = SequenceGate(embed_dim, self.num_experts, gate_hidden_dim, gate_dropout, norm)
        self.reset_parameters()

    @property
    def sees_later(self) -> bool:
        return self.gate is not None and not self.causal

    def route(self, x: Tensor, padding: Optional[Tensor], cache: Optional[Cache]) -> RoutingDecision:
        """The responsibilities g, or the expert drawn from them, per position (causal) or per sequence."""
        draw = current_draw() if self.training else None
        with torch.set_grad_enabled(torch.is_grad_enabled() and draw is None):
            probs, logits, real = self._responsibilities(x, padding, cache)
        if draw is not None:
            chosen = draw.choose(self.name, probs)
        elif not self.training and self.evaluate_with != MIXTURE:
            chosen = probs.argmax(-1)
            if self.evaluate_with == RANDOM_EXPERT:
                chosen.fill_(random_expert(self.name, self.evaluate_seed, self.num_experts))
        else:
            chosen = None
        scope = "tokens" if probs.size(1) == x.size(1) and self.causal else "sequences"
        probs, logits = probs.flatten(0, 1), logits.flatten(0, 1)  # [B, T or 1, E] → [N, E]
        if chosen is None:
            index = torch.arange(self.num_experts, device=probs.device).expand(probs.size(0), -1)
            gate = probs
        else:
            index = chosen.reshape(-1, 1)
            gate = torch.ones_like(index, dtype=probs.dtype)
        no_row = None if real is None else ~real
        if no_row is not None:
            gate = gate.masked_fill(no_row.unsqueeze(-1), 0.0)
        return RoutingDecision(index, gate, probs, logits, self.num_experts, scope=scope, padding_mask=no_row)

    def project_output(self, heads: Tensor, decision: RoutingDecision) -> Tensor:
        """Rescale each head by h/(h−t) · (1 − Σ_{i: j ∈ D_i} g_i), and project."""
        batch, _, tgt_len, _ = heads.shape
        dropped = self.dropped.to(decision.probs.dtype)
        # [N, E] · [E, H]
        left_out = decision.probs @ dropped if decision.chooses_all else dropped[decision.expert_index[:, 0]]
        length = tgt_len if decision.scope == "tokens" else 1
        weight = self.scale * (1.0 - left_out).view(
            batch, length, self.num_heads, 1
        )  # [N, H] → [B, T or 1, H, 1]
        heads = heads.transpose(1, 2) * weight.to(heads.dtype)
        out: Tensor = self.out_proj(heads.reshape(batch, tgt_len, self.embed_dim))  # [B, T, H, D] → [B, T, C]
        return out

    def projection_macs(self, queries: int, keys: int) -> Dict[str, int]:
        gate = 0
        if self.gate is not None:  # it sees one mean of a sequence, or one for each position
            hidden = self.gate.fc1.out_features
            gate = (queries if self.causal else 1) * hidden * (self.embed_dim + self.num_experts)
        return {**super().projection_macs(queries, keys), "router": gate}

    def _responsibilities(
        self, x: Tensor, padding: Optional[Tensor], cache: Optional[Cache]
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """g and its logits, [B, T, E] for a causal gate and [B, 1, E] for others; which rows are real."""
        batch, tgt_len, width = x.shape
        if padding is None and not tgt_len:  # a sequence without tokens is not a row of a gate's statistics
            padding = x.new_zeros(batch, 0, dtype=torch.bool)
        if self.gate is None:
            logits = self.dropped.new_zeros(batch, 1, self.num_experts)
            return torch.softmax(logits, -1), logits, None if padding is None else ~padding.all(1)
        if self.causal:
            mean, length = running_mean(x, padding, self.gate_window, cache), tgt_len
            real = None if padding is None else ~padding.reshape(-1)
        else:
            mean, length = sequence_mean(x, padding), 1
            real = None if padding is None else ~padding.all(1)
        probs, logits = self.gate(mean.reshape(-1, width), real)
        shape = (batch, length, self.num_experts)
        return probs.view(shape), logits.view(shape), real
