"""The tokens that tell most of an expert: greatest pointwise mutual information (MAE §5.1, Table 6).

  moa-fairseq analyze expert-tokens runs/mae7 --words --top 5
  moa-fairseq analyze expert-tokens runs/moa --module decoder.layers.0.self_attn --json tokens.json

PMI(token, expert) = log p(token, expert) / (p(token) p(expert)), in nats. In MAE all tokens of a sequence
count for the expert to which its gate gives the most weight (at a decoder's gates, each token for that of
its position); in MoA a token counts for the K experts that it chose, or with K = E for the one of the
greatest weight. Tokens are those at the module's queries: of the source in the encoder, of the target so
far in the decoder. Padding, sentence ends and unknown words do not count.

BPE pieces ("sub@@") are counted as they are; --words joins them, and each of a word's n pieces then
brings 1/n of the word to its expert. Experts count from 0.

Ids of GPT-2's byte-pair encoding are decoded: ' cat' in quotes begins a word, and bytes that are no
character by themselves are written as \\xNN. In a masked language model the positions chosen to be
guessed (masked, replaced or kept: its --mask-prob) do not count, nor do words with such a piece; how many
positions these are is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from moa_fairseq.analysis.model_arguments import add_model_arguments, checked_model, say_written, write_json
from moa_fairseq.errors import UserError

NAME = "expert-tokens"
SUMMARY = "the tokens that tell most of each expert, by PMI (MAE Table 6)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    add_model_arguments(parser)
    parser.add_argument("--module", metavar="NAME", help="such as decoder.layers.0.self_attn (the first)")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="tokens of each expert (10)")
    parser.add_argument(
        "--min-count", type=int, default=5, metavar="N", help="only tokens that occur N times or more (5)"
    )
    parser.add_argument("--words", action="store_true", help='join BPE pieces ("@@ ") into words')


def analyze(args: argparse.Namespace) -> int:
    """Run a data set through a model and list each expert's tokens."""
    from moa_fairseq.analysis.expert_tokens import measure_expert_tokens

    for flag, value in (("--top", args.top), ("--min-count", args.min_count)):
        if value < 1:
            raise UserError(f"{flag} {value}: at least 1.")
    checkpoint, data = checked_model(args)
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
    if args.json:
        settings = {"subset": args.subset, "min_count": args.min_count, "words": args.words}
        write_json(args.json, {"checkpoint": str(checkpoint), **settings, **dataclasses.asdict(found)})
    print(_lists(found, "words" if args.words else "tokens"))
    say_written(args.json)
    return 0


def _shown(token: str) -> str:
    """In quotes where the eye would miss a space or a control character."""
    return token if token == token.strip() and token.isprintable() else repr(token)


def _lists(found: Any, unit: str) -> str:
    masked = "" if found.masked_out is None else f", {found.masked_out:,} masked positions left out"
    lines = [f"{found.name}, {found.tokens_counted:,} {unit}{masked}; (PMI in nats)"]
    for expert, (share, tokens) in enumerate(zip(found.shares, found.tokens)):
        listed = ", ".join(f"{_shown(token.token)} ({token.pmi:.2f})" for token in tokens) or "-"
        lines.append(f"expert {expert} ({share:.1%}): {listed}")
    return "\n".join(lines)
