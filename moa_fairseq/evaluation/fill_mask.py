"""Let a trained masked language model fill a gap in a sentence.

  moa-fairseq fill-mask runs/quickstart_mlm/average.pt "Click the <mask> to save the file."

Prints the most probable tokens with their probabilities. For models with GPT-2's byte-pair encoding (as
`moa-fairseq prepare *_gpt2bpe` and the masked-LM recipes make them); a token that begins a word carries its
space.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Sequence

import torch
from fairseq.models.roberta.hub_interface import RobertaHubInterface
from omegaconf import OmegaConf

from moa_fairseq.data_prep.gpt2_files import bpe_files, obtain_gpt2_files
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.trained_model import load_trained

MASK = "<mask>"


class Filled(NamedTuple):
    """One way to fill the gap: the token, its probability, and the text with it."""

    token: str
    probability: float
    text: str


def load_hub(checkpoint: Path, data: Optional[Path] = None) -> RobertaHubInterface:
    """fairseq's interface (encode, extract_features, fill_mask, predict) to a RoBERTa or its mixture.

    data: the binarised text, None for the one it was trained on; the encoding's files are taken from there,
    or fetched. Raises UserError if the checkpoint is not a masked language model.
    """
    model, task = load_trained(checkpoint, data)
    if not hasattr(task, "mask_idx"):
        raise UserError(
            f"{checkpoint} is not a masked language model: it was trained for {type(task).__name__}."
        )
    encoder, vocab = encoding_files(Path(task.cfg.data))
    bpe = {"_name": "gpt2", "gpt2_encoder_json": str(encoder), "gpt2_vocab_bpe": str(vocab)}
    return RobertaHubInterface(OmegaConf.create({"bpe": bpe}), task, model).eval()


def encoding_files(data: Path) -> Sequence[Path]:
    """encoder.json and vocab.bpe: those of a binarised folder, or fetched."""
    return bpe_files(data) or obtain_gpt2_files([data])[:2]


@torch.no_grad()
def fill_mask(hub: RobertaHubInterface, text: str, top: int) -> List[Filled]:
    """The `top` most probable tokens for the `<mask>` in `text`; </s> and other symbols are skipped.

    Raises UserError unless the text holds exactly one `<mask>` and fits into the model.
    """
    if text.count(MASK) != 1:
        raise UserError(f"The text must hold exactly one {MASK}, but it holds {text.count(MASK)}: {text!r}")
    if top < 1:
        raise UserError(f"--top {top}: ask for at least one token.")
    before, after = (span.rstrip() for span in text.split(MASK))
    tokens = _encode(hub, before, after)
    if len(tokens) > hub.model.max_positions():
        limit = hub.model.max_positions()
        raise UserError(f"The text has {len(tokens)} subwords, the model positions for {limit}: shorten it.")
    gap = tokens.eq(hub.task.mask_idx)
    logits = hub.model(tokens.unsqueeze(0), masked_tokens=gap.unsqueeze(0))[0]
    filled = []
    symbols = hub.task.source_dictionary.symbols
    for probability, index in zip(*logits[0].float().softmax(-1).sort(descending=True)):
        if symbols[index].isdigit():  # an id of the encoding
            token = hub.bpe.decode(symbols[index])
            filled.append(Filled(token, probability.item(), (before + token + after).strip()))
        if len(filled) == top:
            break
    return filled


def _encode(hub: RobertaHubInterface, before: str, after: str) -> torch.Tensor:
    """<s> before <mask> after </s> as symbols of the dictionary, [T] int64."""
    line = f"<s> {hub.bpe.encode(before)} {MASK} {hub.bpe.encode(after)} </s>"
    return hub.task.source_dictionary.encode_line(line, append_eos=False, add_if_not_exist=False).long()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq fill-mask`."""
    parser.add_argument("checkpoint", type=Path, help="a masked language model, such as a run's average.pt")
    parser.add_argument("text", help=f"a text with one {MASK}")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="binarised text (default: what it was trained on)"
    )
    parser.add_argument(
        "--top", type=int, default=5, metavar="N", help="how many tokens (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the most probable tokens."""
    filled = fill_mask(load_hub(args.checkpoint, args.data), args.text, args.top)
    if args.json:
        rows: List[Any] = [entry._asdict() for entry in filled]
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        for entry in filled:
            print(f"{entry.probability:7.4f}  {entry.token!r:<16} {entry.text}")
    return 0
