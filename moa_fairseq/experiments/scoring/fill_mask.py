"""Let a masked language model with GPT-2's encoding fill a gap.

  moa-fairseq fill-mask runs/quickstart_mlm/average.pt "Click the <mask> to save the file."

prints lines such as this one, where the space in quotes begins a word:

   0.1250  ' button'        Click the button to save the file.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import Encoder
from torch import Tensor, nn

from moa_fairseq.errors import UserError, printable
from moa_fairseq.experiments.data.gpt2_files import encoder_of
from moa_fairseq.experiments.data.text_files import (
    run_copy_of,
    unverified_text_files,
    warn_of_unverified,
)
from moa_fairseq.experiments.scoring.trained_model import load_masked_lm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq fill-mask`."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="a masked language model, such as a run's average.pt")
    add("text", help="a text with one <mask>")
    add("--data", type=Path, metavar="DIR", help="binarised text (default: that of training)")
    add("--top", type=int, default=5, metavar="N", help="how many tokens (%(default)s)")
    add("--json", action="store_true", help="print JSON")


def symbols_of(parts: Sequence[str], encoder: Encoder, dictionary: Dictionary) -> Tensor:
    """The symbols that a masked language model reads for a text: <s>, GPT-2's ids, </s>.

    Args:
        parts: the parts of the text before, between and after the <mask> symbols.
        encoder: the encoder of GPT-2's byte-pair encoding.
        dictionary: the dictionary of the model.

    Returns:
        The symbols, [T] int64.
    """
    ids = " <mask> ".join(" ".join(map(str, encoder.encode(part))) for part in parts)
    return dictionary.encode_line(f"<s> {ids}", add_if_not_exist=False).long()


def _ranked_tokens(
    model: nn.Module, task: Any, encoder: Encoder, symbols: Tensor
) -> Iterator[tuple[str, float]]:
    """GPT-2's tokens and their probabilities at the <mask>, the most probable first."""
    logits = model(symbols[None], masked_tokens=symbols[None].eq(task.mask_idx))[0][0]
    probabilities, order = logits.detach().float().softmax(-1).sort(descending=True)
    for index, probability in zip(order.tolist(), probabilities.tolist()):
        symbol = task.source_dictionary[index]
        if symbol.isdigit():  # not </s> and the like
            yield encoder.decode([int(symbol)]), probability


def _load(checkpoint: Path, named_data: Path | None) -> tuple[Any, Any, Path]:
    """The model, its task, and the folder of its encoding: the run's copy of it, else the data itself."""
    run_copy = run_copy_of(checkpoint)
    model, task = load_masked_lm(checkpoint, named_data or run_copy)
    if run_copy:
        return model, task, run_copy
    data = Path(task.cfg.data).resolve()
    unverified = unverified_text_files(checkpoint, data, named=named_data is not None)
    warn_of_unverified(unverified, checkpoint, data)
    return model, task, data


def run(args: argparse.Namespace) -> int:
    """Print the most probable tokens; </s> and other symbols are left out."""
    if args.text.count("<mask>") != 1 or args.top < 1:
        raise UserError("Give a text with exactly one <mask>, and --top 1 or more.")
    if sys.stdout is None:  # `>&-`
        raise UserError("Standard output is closed: redirect it with `> FILE`.")
    model, task, data = _load(args.checkpoint, args.data)
    encoder = encoder_of(data)
    before, after = map(str.rstrip, args.text.split("<mask>"))
    symbols = symbols_of([before, after], encoder, task.source_dictionary)
    limit = model.max_positions()
    if len(symbols) > limit:
        raise UserError(
            f"The text has {len(symbols)} subwords, the model positions for {limit}: shorten it."
        )
    rows: list[dict[str, Any]] = []
    ranked = _ranked_tokens(model.eval(), task, encoder, symbols)
    for token, probability in islice(ranked, args.top):
        text = (before + token + after).strip()
        rows.append({"token": token, "probability": probability, "text": text})
    if args.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    # `repr` makes the token safe for a terminal; the text needs `printable`
    escape = printable if sys.stdout.isatty() else str
    for row in rows:
        print(f"{row['probability']:7.4f}  {row['token']!r:<16} {escape(row['text'])}")
    return 0
