"""Which tokens an expert is for: the pointwise mutual information of tokens and experts (MAE Table 6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from moa_fairseq.analysis.forward_passes import forward_passes
from moa_fairseq.analysis.gpt2_pieces import gpt2_pieces
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.trained_model import device_for, load_trained

CONTINUES = "@@"  # at the end of a BPE piece: the next piece belongs to the same word

Segmenter = Callable[[Sequence[Optional[str]]], Iterator[Tuple[str, List[int]]]]


@dataclass(frozen=True)
class Indicative:
    """A token that an expert gets more often than chance would have it. pmi in nats."""

    token: str
    pmi: float
    count: float


def pieces(symbols: Sequence[Optional[str]]) -> Iterator[Tuple[str, List[int]]]:
    """(token, [its position]) of a sequence; None marks what is not counted (padding, special symbols)."""
    for position, symbol in enumerate(symbols):
        if symbol is not None:
            yield symbol, [position]


def words(symbols: Sequence[Optional[str]]) -> Iterator[Tuple[str, List[int]]]:
    """(word, positions of its BPE pieces); words that a None or the end cuts off are left out."""
    start = 0
    for position, symbol in enumerate(symbols):
        if symbol is not None and symbol.endswith(CONTINUES):
            continue
        if symbol is not None:
            parts = [part[: -len(CONTINUES)] for part in symbols[start:position]]
            yield "".join([*parts, symbol]), list(range(start, position + 1))
        start = position + 1


class TokenCounter:
    """How often each token met each expert of one module.

    A token counts once for every expert that its position is attributed to, and a word of n pieces 1/n for
    those of each piece.
    """

    def __init__(self, segment: Segmenter = pieces) -> None:
        self.segment = segment
        self.num_experts = 0
        self.occurrences: Dict[str, int] = {}
        self._counts: Dict[str, List[float]] = {}

    def add(
        self,
        sequences: Sequence[Sequence[Optional[str]]],
        experts: Tensor,
        hidden: Optional[Tensor] = None,
    ) -> None:
        """Count a batch: B sequences of T symbols each; experts [B, T, E] bool, as of `attributed`.

        hidden: [B, T] bool, positions whose symbol the model does not see: no token with one counts.
        """
        self.num_experts = experts.size(-1)
        masks = experts.new_zeros(experts.shape[:2]) if hidden is None else hidden
        for symbols, rows, masked in zip(sequences, experts.tolist(), masks.tolist()):
            places = [[expert for expert, counts in enumerate(row) if counts] for row in rows]
            for token, positions in self.segment(symbols):
                if any(masked[position] for position in positions):
                    continue
                counts = self._counts.setdefault(token, [0.0] * self.num_experts)
                self.occurrences[token] = self.occurrences.get(token, 0) + 1
                for position in positions:
                    for expert in places[position]:
                        counts[expert] += 1 / len(positions)

    def expert_shares(self) -> List[float]:
        """p(expert): the share of all attributions that fell on each expert, [E]."""
        totals = self._totals()
        return [total / sum(totals) for total in totals]

    def indicative(self, top: int, min_count: int) -> List[List[Indicative]]:
        """For each expert the `top` tokens of greatest PMI that occur at least min_count times.

        PMI = log p(token, expert) / (p(token) p(expert)), probabilities being shares of all attributions.
        Of equals, the one that the expert gets more often comes first.
        """
        totals = self._totals()
        everything = sum(totals)
        found: List[List[Indicative]] = [[] for _ in totals]
        for token, counts in self._counts.items():
            if self.occurrences[token] < min_count:
                continue
            mine = sum(counts)
            for expert, count in enumerate(counts):
                if count > 0:
                    pmi = math.log(count * everything / (mine * totals[expert]))
                    found[expert].append(Indicative(token, pmi, count))
        order = [sorted(tokens, key=lambda t: (-round(t.pmi, 9), -t.count, t.token)) for tokens in found]
        return [tokens[:top] for tokens in order]

    def _totals(self) -> List[float]:
        return [sum(column) for column in zip(*self._counts.values())]


def attributed(decision: RoutingDecision, batch: int, length: int) -> Tensor:
    """Which experts each position of a batch counts for: [B, T, E] bool.

    Those that it chose; where every expert takes part (MAE; MoA with K = E), the one with the greatest
    weight. Where a sequence has one decision, all of its positions count for it.
    """
    index = decision.expert_index
    if decision.chooses_all:
        index = decision.probs.argmax(-1, keepdim=True)
    chosen = torch.zeros_like(decision.probs, dtype=torch.bool).scatter_(1, index, True)
    per_sequence = 1 if decision.scope == "sequences" else length
    return chosen.view(batch, per_sequence, -1).expand(batch, length, -1)


@dataclass
class ExpertTokens:
    """One module's experts and their tokens: shares [E] of all tokens, tokens [E] lists.

    masked_out: the positions that were left out because the model had to guess them, of a masked language
    model; None of others.
    """

    name: str
    tokens_counted: int
    shares: List[float]
    tokens: List[List[Indicative]]
    masked_out: Optional[int] = None


def measure_expert_tokens(
    checkpoint: Path,
    data: Path,
    subset: str = "valid",
    module: Optional[str] = None,
    top: int = 10,
    min_count: int = 5,
    join_words: bool = False,
    max_tokens: int = 4096,
    cpu: bool = False,
) -> ExpertTokens:
    """Run `subset` of the binarised `data` through the model; whose queries are an expert's?

    module: its path in the model; None for the first that runs (the first layer's self-attention). Ids of
    GPT-2's encoding are decoded. Of a masked language model the positions that are chosen to be guessed
    (masked, replaced or kept) are left out, and so is a word with one of them. Raises UserError for an
    unknown module or one with a uniform gate, and as `forward_passes` does.
    """
    model, task = load_trained(checkpoint, data)
    spelling = gpt2_pieces(task, data)
    if spelling:
        counter = TokenCounter(spelling.words if join_words else spelling.pieces)
    else:
        counter = TokenCounter(words if join_words else pieces)
    masked_out = 0 if hasattr(task, "mask_idx") else None
    for sample, decisions in forward_passes(task, model, subset, max_tokens, device_for(cpu)):
        module = module or decisions[0][0]
        decision = _decision_of(module, decisions, model)
        tokens, dictionary = _queries(module, sample["net_input"], task)
        experts = attributed(decision, *tokens.shape).cpu()
        hidden = None
        if masked_out is not None:
            hidden = sample["target"].ne(dictionary.pad())
            tokens = torch.where(hidden, sample["target"], tokens)
            masked_out += int((hidden & tokens.ge(dictionary.nspecial)).sum())
        counter.add([_symbols(row, dictionary) for row in tokens.tolist()], experts, hidden)
    if not counter.occurrences:
        raise UserError(f"The subset {subset} of {data} holds no words.")
    lists = counter.indicative(top, min_count)
    counted = sum(counter.occurrences.values())
    return ExpertTokens(module, counted, counter.expert_shares(), lists, masked_out)


def _decision_of(
    module: str, decisions: Sequence[Tuple[str, RoutingDecision]], model: nn.Module
) -> RoutingDecision:
    named = dict(decisions)
    if module not in named:
        raise UserError(f"--module {module} is none of this model's: {', '.join(named)}.")
    attention = dict(model.named_modules())[module]
    if isinstance(attention, MixtureOfAttentiveExperts) and attention.gate is None:
        raise UserError(f"The gate of {module} is uniform: it prefers no expert to another for any token.")
    return named[module]


def _queries(module: str, net_input: Dict[str, Any], task: Any) -> Tuple[Tensor, Any]:
    """The tokens [B, T] at the queries' positions of a module, and the dictionary that they are of."""
    if module.startswith("decoder") and "prev_output_tokens" in net_input:
        return net_input["prev_output_tokens"], task.target_dictionary
    return net_input["src_tokens"], task.source_dictionary


def _symbols(row: Sequence[int], dictionary: Any) -> List[Optional[str]]:
    """The symbols of token ids; None for padding, sentence ends and unknown words."""
    return [dictionary[token] if token >= dictionary.nspecial else None for token in row]
