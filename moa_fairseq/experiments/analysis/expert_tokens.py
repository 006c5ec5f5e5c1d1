"""The most indicative tokens of an expert, by pointwise mutual information (MAE §5.1, Table 6).

  moa-fairseq analyze expert-tokens runs/mae7 --words --top 5
  moa-fairseq analyze expert-tokens runs/moa --module decoder.layers.0.self_attn --json tokens.json

PMI(token, expert) = log [p(token, expert) / (p(token) p(expert))], in nats. In MAE all tokens of a sequence
count for the expert to which its gate gives the most weight (in a decoder each token counts for the expert of
its own position). In MoA a token counts for the K experts that it chose, or with K = E for the one with the
greatest weight. Tokens are those at the module's queries: the source in the encoder, the target so far in the
decoder. SwitchHead chooses experts for keys, too: --module decoder.layers.0.encoder_attn.keys counts tokens
of the source. Padding, sentence ends and unknown words do not count.

Pieces ("sub@@" of BPE, "▁sub" of SentencePiece) are counted as they are; --words joins them, and each of a
word's n pieces then counts as 1/n of the word for its expert. Experts are numbered from 0.

Ids of GPT-2's byte-pair encoding are decoded: ' cat' in quotes begins a word, and bytes that are not a
character by themselves are written as \\xNN. In a masked language model the positions chosen to be guessed
(masked, replaced or kept: its --mask-prob) do not count, nor do words with such a piece; the number of these
positions is printed.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.gpt2_pieces import gpt2_pieces
from moa_fairseq.experiments.analysis.result import Analysis
from moa_fairseq.experiments.analysis.routed_model import forward_passes
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.routing import Routing
from moa_fairseq.text.subwords import join_subwords

NAME = "expert-tokens"
SUMMARY = "the most indicative tokens of each expert, by PMI (MAE Table 6)"
BEGINS = "\u2581"  # the first character of a SentencePiece piece that begins a word
CONTINUES = "@@"  # the end of a BPE piece whose word continues in the next piece

Segmenter = Callable[[Sequence[str | None]], Iterator[tuple[str, list[int]]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    add = parser.add_argument
    add("--module", metavar="NAME", help="such as decoder.layers.0.self_attn (the first)")
    add("--top", type=int, default=10, metavar="N", help="tokens of each expert (10)")
    add(
        "--min-count",
        type=int,
        default=5,
        metavar="N",
        help="only tokens that occur at least N times (5)",
    )
    add("--words", action="store_true", help="join pieces (@@ or ▁) into words")


def analyze(args: argparse.Namespace, model: nn.Module, task: Any) -> Analysis:
    """The most indicative tokens of each expert of one module.

    Args:
        args: the flags: module (None: the first router), top, min_count, words, data (the binarised folder),
            subset, max_tokens (of a batch) and cpu.
        model, task: what `load_trained` returns.

    Raises:
        UserError: if the module does not exist or has a uniform gate, if the subset has no words, or if a
            flag is below 1.
    """
    for flag, value in (("--top", args.top), ("--min-count", args.min_count)):
        if value < 1:
            raise UserError(f"{flag} {value} must be at least 1.")
    counter = TokenCounter(segmenter(task, args.data, args.words))
    num_guessed = 0
    name = args.module
    for batch, pairs in forward_passes(model, task, args.subset, args.max_tokens, args.cpu):
        routings = dict(pairs)
        name = name or pairs[0][0]  # the first router: the first layer's self-attention
        if name not in routings:
            raise UserError(
                f"--module {name} is not in this model, which has {', '.join(routings)}."
            )
        if is_uniform(model, name):
            raise UserError(f"The gate of {name} is uniform: it prefers no expert for any token.")
        num_guessed += count_batch(counter, name, routings[name], batch, task)
    if not counter.occurrences:
        raise UserError(f"The subset {args.subset} of {args.data} holds no words.")
    report = {
        "min_count": args.min_count,
        "words": args.words,
        "name": name,
        "tokens_counted": sum(counter.occurrences.values()),
        "shares": counter.expert_shares(),
        "tokens": counter.indicative(args.top, args.min_count),
        "masked_out": num_guessed if hasattr(task, "mask_idx") else None,
    }
    return Analysis(_lines(report), report=report)


def segmenter(task: Any, data: Path, join: bool = False) -> Segmenter:
    """The function that makes tokens from symbols: single pieces, or words.

    Args:
        task: fairseq's task with its dictionaries.
        data: the binarised folder.
        join: whether the pieces of a word are joined. The ids of GPT-2's encoding are always decoded.

    Raises:
        UserError: if the files of GPT-2's encoding are needed and cannot be downloaded.
    """
    if spelling := gpt2_pieces(task, data):
        return spelling.words if join else spelling.pieces
    if not join:
        return single_symbols
    if any(symbol.startswith(BEGINS) for symbol in task.source_dictionary.symbols):
        return sentencepiece_words
    return bpe_words


def is_uniform(model: nn.Module, name: str) -> bool:
    """Whether a router is MAE's uniform gate, which prefers no expert.

    Args:
        model: the model with the router.
        name: the name of the router.
    """
    attention = dict(model.named_modules())[name.removesuffix(".keys")]
    return isinstance(attention, MixtureOfAttentiveExperts) and attention.gate is None


def count_batch(
    counter: TokenCounter, name: str, routing: Routing, batch: dict[str, Any], task: Any
) -> int:
    """Count the tokens of a batch for the experts that they are attributed to.

    Args:
        counter: the counter of a router.
        name: the name of the router.
        routing: the router's routing of the batch.
        batch: the batch.
        task: fairseq's task with its dictionaries.

    Returns:
        The number of positions that were left out because a masked language model has to guess them.
    """
    tokens, dictionary = _tokens_at(name, batch["net_input"], task)
    guessed = None
    num_guessed = 0
    if hasattr(task, "mask_idx"):
        guessed = batch["target"].ne(dictionary.pad())
        tokens = torch.where(guessed, batch["target"], tokens)
        num_guessed = int((guessed & tokens.ge(dictionary.nspecial)).sum())
    symbols = []
    for row in tokens.tolist():
        # Padding, sentence ends and unknown words do not count
        symbols.append([dictionary[t] if t >= dictionary.nspecial else None for t in row])
    counter.add(symbols, attributed(routing, *tokens.shape).cpu(), guessed)
    return num_guessed


def _tokens_at(name: str, net_input: dict[str, Any], task: Any) -> tuple[Tensor, Any]:
    """The tokens at the inputs of a router, [B, T], with their dictionary."""
    routes_source = name.endswith("encoder_attn.keys")  # the keys of cross-attention
    if name.startswith("decoder") and not routes_source and "prev_output_tokens" in net_input:
        return net_input["prev_output_tokens"], task.target_dictionary
    return net_input["src_tokens"], task.source_dictionary


def single_symbols(symbols: Sequence[str | None]) -> Iterator[tuple[str, list[int]]]:
    """Each symbol with its position, [position]; None stands for a symbol that does not count."""
    for position, symbol in enumerate(symbols):
        if symbol is not None:
            yield symbol, [position]


def bpe_words(symbols: Sequence[str | None]) -> Iterator[tuple[str, list[int]]]:
    """Each word with the positions of its BPE pieces; words that a None or the end cuts off do not count."""
    parts: list[str] = []
    for position, symbol in enumerate(symbols):
        if symbol is None:
            parts = []
            continue
        parts.append(symbol.removesuffix(CONTINUES))
        if not symbol.endswith(CONTINUES):
            yield "".join(parts), list(range(position - len(parts) + 1, position + 1))
            parts = []


def sentencepiece_words(symbols: Sequence[str | None]) -> Iterator[tuple[str, list[int]]]:
    """Each word with the positions of its SentencePiece pieces; words that begin with a None do not count."""
    parts: list[str] = []
    for position, symbol in enumerate([*symbols, None]):
        if symbol is not None and not symbol.startswith(BEGINS):
            parts.append(symbol)
            continue
        if parts and parts[0].startswith(BEGINS):
            word = join_subwords(" ".join(parts), "sentencepiece")
            yield word, list(range(position - len(parts), position))
        parts = [symbol] if symbol is not None else []


class TokenCounter:
    """Counts how often each token is attributed to each expert of one module.

    A token counts once for every expert that its position is attributed to. Each of a word's n pieces counts
    1/n for the experts of that piece.

    Args:
        segment: a function that makes tokens with their positions from the symbols of a sequence, such as
            `single_symbols` or `bpe_words`. A symbol that does not count is None.
    """

    def __init__(self, segment: Segmenter = single_symbols) -> None:
        self.segment = segment
        self.occurrences: Counter = Counter()
        self.attributions: dict[str, NDArray[np.float64]] = {}  # token → [E]

    def add(
        self,
        sequences: Sequence[Sequence[str | None]],
        experts: Tensor,
        guessed: Tensor | None = None,
    ) -> None:
        """Count a batch of B sequences.

        Args:
            sequences: the T symbols of each sequence; a symbol that does not count is None.
            experts: the experts that each position is attributed to, [B, T, E] bool, from `attributed`.
            guessed: the positions whose symbol the model has to guess, [B, T] bool. Tokens with such a
                position do not count.
        """
        shares = experts.double().numpy()
        is_guessed = np.zeros(shares.shape[:2], bool) if guessed is None else guessed.cpu().numpy()
        for row, symbols in enumerate(sequences):
            for token, positions in self.segment(symbols):
                if not is_guessed[row, positions].any():
                    self.occurrences[token] += 1
                    share = shares[row, positions].mean(0)
                    self.attributions[token] = self.attributions.get(token, 0.0) + share

    def expert_shares(self) -> list[float]:
        """p(expert): the share of all attributions that fell on each expert, [E]."""
        totals = np.sum([*self.attributions.values()], axis=0)
        return (totals / totals.sum()).tolist()

    def indicative(self, top: int, min_count: int) -> list[list[dict[str, Any]]]:
        """The tokens with the largest PMI, for each expert.

        PMI = log [p(token, expert) / (p(token) p(expert))]; probabilities are shares of all attributions. Of
        two tokens with the same PMI, the one with more attributions to the expert comes first.

        Args:
            top: the largest number of tokens for each expert.
            min_count: tokens that occur less often in the data are left out.

        Returns:
            For each expert its tokens, as dictionaries with "token", "pmi" in nats, and "count", the number
            of attributions to this expert.
        """
        lists: list[list[dict[str, Any]]] = []
        for expert, share in enumerate(self.expert_shares()):
            rows = []
            for token, counts in self.attributions.items():
                if counts[expert] > 0 and self.occurrences[token] >= min_count:
                    # p(expert | token) / p(expert)
                    pmi = math.log(counts[expert] / counts.sum() / share)
                    rows.append({"token": token, "pmi": pmi, "count": counts[expert]})
            rows.sort(key=lambda row: (-round(row["pmi"], 9), -row["count"], row["token"]))
            lists.append(rows[:top])
        return lists


def attributed(routing: Routing, batch: int, length: int) -> Tensor:
    """The experts that each position of a batch is attributed to.

    These are the experts that it chose. If every expert takes part (MAE; MoA with K = E), it is only the
    expert with the largest weight.

    Args:
        routing: the routing of B·T tokens, or of B sequences, which then holds for all positions.
        batch: B, the number of sequences.
        length: T, the number of positions of each.

    Returns:
        A mask, [B, T, E] bool.
    """
    index = routing.expert_ids
    if routing.chooses_all:
        index = routing.probs.argmax(-1, keepdim=True)
    choices = torch.zeros_like(routing.probs, dtype=torch.bool).scatter_(1, index, True)
    per_sequence = 1 if routing.scope == "sequences" else length
    return choices.view(batch, per_sequence, -1).expand(batch, length, -1)


def _lines(report: dict[str, Any]) -> list[str]:
    """The tokens of each expert, as lines to print."""
    unit = "words" if report["words"] else "tokens"
    num_guessed = report["masked_out"]
    guessed = "" if num_guessed is None else f", {num_guessed:,} masked positions left out"
    lines = [f"{report['name']}, {report['tokens_counted']:,} {unit}{guessed} (PMI in nats)"]
    for expert, (share, tokens) in enumerate(zip(report["shares"], report["tokens"])):
        texts = []
        for token in tokens:
            text = token["token"]
            # Quotes show spaces, and characters that a reader would not see
            if not (text == text.strip() and text.isprintable()):
                text = repr(text)
            texts.append(f"{text} ({token['pmi']:.2f})")
        lines.append(f"expert {expert} ({share:.1%}): {', '.join(texts) or '-'}")
    return lines
