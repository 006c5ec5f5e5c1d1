"""Let a trained masked language model fill a gap in a sentence.

  moa-fairseq fill-mask runs/quickstart_mlm/average.pt "Click the <mask> to save the file."

Prints the most probable tokens with their probabilities. For models over GPT-2's byte-pair encoding (what
`moa-fairseq gpt2-bpe` and the masked-LM recipes prepare); a token that begins a word carries its space.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, List, NamedTuple, Optional

import torch
from fairseq.models.roberta.hub_interface import RobertaHubInterface
from omegaconf import OmegaConf

from moa_fairseq.data_prep.gpt2_files import obtain_gpt2_files
from moa_fairseq.data_prep.prepare_text import bpe_files
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

    data: the binarised text, None for the one it was trained on; the encoding's files are taken from it, or
    fetched. Raises UserError if the checkpoint is no masked language model.
    """
    model, task = load_trained(checkpoint, data)
    if not hasattr(task, "mask_idx"):
        raise UserError(
            f"{checkpoint} is no masked language model: it was trained for {type(task).__name__}."
        )
    folder = Path(task.cfg.data)
    beside = bpe_files(folder)
    encoder, vocab = beside or obtain_gpt2_files([folder], say=lambda line: None)[:2]
    bpe = {"_name": "gpt2", "gpt2_encoder_json": str(encoder), "gpt2_vocab_bpe": str(vocab)}
    return RobertaHubInterface(OmegaConf.create({"bpe": bpe}), task, model).eval()


@torch.no_grad()
def fill_mask(hub: RobertaHubInterface, text: str, top: int) -> List[Filled]:
    """The `top` most probable tokens for the one `<mask>` in `text`. Raises UserError without exactly one."""
    found = text.count(MASK)
    if found != 1:
        raise UserError(f"The text must hold exactly one {MASK}, and it holds {found}: {text!r}")
    if not 1 <= top <= len(hub.task.source_dictionary):
        raise UserError(
            f"--top {top}: must lie between 1 and the {len(hub.task.source_dictionary):,} symbols."
        )
    length, limit = len(_tokens(hub, text)), hub.model.max_positions()
    if length > limit:
        raise UserError(f"The text has {length} subwords; the model has positions for {limit}: shorten it.")
    return [
        Filled(token, probability, filled) for filled, probability, token in hub.fill_mask(text, topk=top)
    ]


def _tokens(hub: RobertaHubInterface, text: str) -> torch.Tensor:
    """The text without its gap, plus one token for that."""
    before, _, after = text.partition(MASK)
    return torch.cat([hub.encode(before.rstrip()), hub.encode(after)[2:]])


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
