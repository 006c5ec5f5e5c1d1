"""The most indicative tokens of an expert, by pointwise mutual information (MAE §5.1, Table 6).

  moa-fairseq analyze expert-tokens runs/mae7 --words --top 5
  moa-fairseq analyze expert-tokens runs/moa --module decoder.layers.0.self_attn --json tokens.json

PMI(token, expert) = log p(token, expert) / (p(token) p(expert)), in nats. In MAE all tokens of a sequence
count for the expert to which its gate gives the most weight (in a decoder each token counts for the expert of
its own position). In MoA a token counts for the K experts that it chose, or with K = E for the one with the
greatest weight. Tokens are those at the module's queries: the source in the encoder, the target so far in the
decoder. Padding, sentence ends and unknown words do not count.

BPE pieces ("sub@@") are counted as they are; --words joins them, and each of a word's n pieces then counts as
1/n of the word for its expert. Experts are numbered from 0.

Ids of GPT-2's byte-pair encoding are decoded: ' cat' in quotes begins a word, and bytes that are not a
character by themselves are written as \\xNN. In a masked language model the positions chosen to be guessed
(masked, replaced or kept: its --mask-prob) do not count, nor do words with such a piece; the number of these
positions is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from moa_fairseq.analysis.gpt2_pieces import gpt2_pieces
from moa_fairseq.analysis.routed_model import (
    add_model_arguments,
    checkpoint_and_data,
    finish,
    forward_passes,
)
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.trained_model import device_for, load_trained

NAME = "expert-tokens"
SUMMARY = "the most indicative tokens of each expert, by PMI (MAE Table 6)"
CONTINUES = "@@"  # at the end of a BPE piece: the next piece belongs to the same word

Segmenter = Callable[[Sequence[Optional[str]]], Iterator[Tuple[str, List[int]]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    add_model_arguments(parser)
    parser.add_argument("--module", metavar="NAME", help="such as decoder.layers.0.self_attn (the first)")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="tokens of each expert (10)")
    parser.add_argument(
        "--min-count", type=int, default=5, metavar="N", help="only tokens that occur at least N times (5)"
    )
    parser.add_argument("--words", action="store_true", help='join BPE pieces ("@@ ") into words')


def analyze(args: argparse.Namespace) -> int:
    """Run a data set through a model and list each expert's tokens."""
    for flag, value in (("--top", args.top), ("--min-count", args.min_count)):
        if value < 1:
            raise UserError(f"{flag} {value} must be at least 1.")
    checkpoint, data = checkpoint_and_data(args.model, args.data, args.max_tokens)
    found = measure_expert_tokens(
        checkpoint,
        data,
        args.subset,
        args.module,
        args.top,
        args.min_count,
        args.words,
        args.max_tokens,
        args.cpu,
    )
    report = {
        "checkpoint": str(checkpoint),
        "subset": args.subset,
        "min_count": args.min_count,
        "words": args.words,
        **dataclasses.asdict(found),
    }
    finish(_lists(found, "words" if args.words else "tokens"), report, args.json)
    return 0


@dataclass(frozen=True)
class Indicative:
    """A token that an expert gets more often than by chance. pmi in nats."""

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
            parts = [part[: -len(CONTINUES)] for part in symbols[start:position] if part]
            yield "".join([*parts, symbol]), list(range(start, position + 1))
        start = position + 1


class TokenCounter:
    """How often each token met each expert of one module.

    A token counts once for every expert that its position is attributed to. Each of a word's n pieces counts
    1/n for the experts of that piece.
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

        hidden: [B, T] bool, positions whose symbol the model does not see: tokens with such a position do not
        count.
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
        Among equals, the one that the expert gets more often comes first.
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

    Those that it chose; if every expert takes part (MAE; MoA with K = E), the one with the greatest weight.
    If a sequence has one decision, it holds for all positions.
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

    masked_out: in a masked language model, the number of positions left out because the model had to guess
    them; None for other models.
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
    """Run `subset` of the binarised `data` through the model, and count which tokens chose which expert.

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
    if module is None or not counter.occurrences:
        raise UserError(f"The subset {subset} of {data} holds no words.")
    lists = counter.indicative(top, min_count)
    counted = sum(counter.occurrences.values())
    return ExpertTokens(module, counted, counter.expert_shares(), lists, masked_out)


def _decision_of(
    module: str, decisions: Sequence[Tuple[str, RoutingDecision]], model: nn.Module
) -> RoutingDecision:
    named = dict(decisions)
    if module not in named:
        raise UserError(f"--module {module} is not in this model, which has {', '.join(named)}.")
    attention = dict(model.named_modules())[module]
    if isinstance(attention, MixtureOfAttentiveExperts) and attention.gate is None:
        raise UserError(f"The gate of {module} is uniform: it prefers no expert for any token.")
    return named[module]


def _queries(module: str, net_input: Dict[str, Any], task: Any) -> Tuple[Tensor, Any]:
    """The tokens [B, T] at the queries' positions of a module, and their dictionary."""
    if module.startswith("decoder") and "prev_output_tokens" in net_input:
        return net_input["prev_output_tokens"], task.target_dictionary
    return net_input["src_tokens"], task.source_dictionary


def _symbols(row: Sequence[int], dictionary: Any) -> List[Optional[str]]:
    """The symbols of token ids; None for padding, sentence ends and unknown words."""
    return [dictionary[token] if token >= dictionary.nspecial else None for token in row]


def _lists(found: ExpertTokens, unit: str) -> str:
    masked = "" if found.masked_out is None else f", {found.masked_out:,} masked positions left out"
    lines = [f"{found.name}, {found.tokens_counted:,} {unit}{masked}; (PMI in nats)"]
    for expert, (share, tokens) in enumerate(zip(found.shares, found.tokens)):
        listed = ", ".join(f"{_shown(token.token)} ({token.pmi:.2f})" for token in tokens) or "-"
        lines.append(f"expert {expert} ({share:.1%}): {listed}")
    return "\n".join(lines)


def _shown(token: str) -> str:
    """In quotes if it holds a space or a control character, which a reader would not see."""
    return token if token == token.strip() and token.isprintable() else repr(token)
