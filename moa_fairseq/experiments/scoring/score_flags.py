"""The flags of `moa-fairseq score`: those for texts, and those for models."""

import argparse
from pathlib import Path

from moa_fairseq.experiments.scoring.chains import KEYS, TOKENIZERS


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for texts, and --json."""
    add = parser.add_argument
    chains = list(KEYS)
    add(
        "log",
        nargs="*",
        metavar="GENERATE_OUTPUT",
        help="what fairseq-generate printed, or a run folder",
    )
    add(
        "--hypothesis",
        nargs="+",
        default=[],
        metavar="FILE",
        help="instead of a log: one translation per line",
    )
    add(
        "--against",
        nargs="+",
        metavar="FILE",
        help="another system's output of the same sentences, a file for each seed: is the difference real?",
    )
    add(
        "--reference",
        metavar="FILE",
        action="append",
        default=[],
        help="the hypothesis's reference; can be repeated",
    )
    add("--chain", action="append", choices=chains, help="only this chain; can be repeated")
    add(
        "--also",
        action="append",
        default=[],
        choices=chains,
        help="a further chain; can be repeated",
    )
    add(
        "--target-lang",
        metavar="LANG",
        help="the text's language (default: that of the log, or of the recipe.yaml in its folder, else de)",
    )
    add(
        "--sacrebleu-tokenizer",
        choices=TOKENIZERS,
        help="default: what sacreBLEU takes for the language",
    )
    add(
        "--raw-reference",
        metavar="FILE",
        help="untokenised reference for sacreBLEU, one line per sentence",
    )
    add(
        "--detokenized",
        action="store_true",
        help="the texts are running text: sacreBLEU takes them as given",
    )
    add(
        "--remove-bpe",
        choices=["auto", "none", "subword_nmt", "sentencepiece"],
        help="join subwords first; auto looks for the marks (@@ or ▁) on each side separately (default: "
        "auto for a log, none for files)",
    )
    add("--lowercase", action="store_true", help="multi-bleu.perl -lc; sacreBLEU is cased")
    add(
        "--allow-partial",
        action="store_true",
        help="score a log that was cut short or lacks sentences",
    )
    add("--json", action="store_true", help="print one JSON object")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for models."""
    add = parser.add_argument_group("models").add_argument
    add("--masked-lm", type=Path, metavar="CHECKPOINT", help="score this masked language model")
    add("--classifier", type=Path, metavar="CHECKPOINT", help="score this classifier")
    add("--data", type=Path, metavar="DIR", help="binarised text (default: what it was trained on)")
    add("--subset", default="test", help="default: %(default)s")
    add("--max-tokens", type=int, default=4096, metavar="N", help="tokens at once (default: 4096)")
    add("--cpu", action="store_true", help="do not use a GPU")
    add(
        "--sample-break-mode",
        choices=["none", "complete", "complete_doc", "eos"],
        help="of --masked-lm: how the text is cut (default: as in training); none cuts long lines to fit",
    )
    add(
        "--maskings",
        type=int,
        default=5,
        metavar="N",
        help="of --masked-lm: how many are averaged (default: %(default)s)",
    )
    add(
        "--mask-seed",
        type=int,
        default=1,
        metavar="S",
        help="of --masked-lm: seeds S, S+1, ... (default: %(default)s)",
    )
