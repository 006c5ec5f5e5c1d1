"""A trained run as fairseq's hub interface, with the run's own treatment of text."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.hub_utils import GeneratorHubInterface

from moa_fairseq.errors import UserError, printable
from moa_fairseq.experiments.data.binarised import is_binarised
from moa_fairseq.experiments.data.text_files import kept_text, same_text, warn_of
from moa_fairseq.experiments.inference.export import named_model
from moa_fairseq.experiments.inference.text_codec import WordCodec, codec_of
from moa_fairseq.experiments.recipes.checkpoints import checkpoint_and_data, prepare_facts
from moa_fairseq.experiments.scoring.trained_model import device_for
from moa_fairseq.files import atomic_write, refuse_overwriting
from moa_fairseq.text.workers import chunks

log = logging.getLogger(__name__)
BATCH = 64  # lines that are read before the first of them is answered, where nobody types them


def add_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """The run, its text, and how it is read."""
    text = "run folder, exported model, or checkpoint with --data"
    parser.add_argument("run_dir", type=Path, nargs="?", metavar="RUN", help=text)
    parser.add_argument(
        "file", type=Path, nargs="?", metavar="FILE", help=f"{kind} (standard input)"
    )
    text = "exported model by name instead of RUN, in $MOA_FAIRSEQ_MODELS or ~/.cache/moa_fairseq/models"
    parser.add_argument("--model", metavar="NAME", help=text)
    parser.add_argument("--output", type=Path, metavar="FILE", help="output file (standard output)")
    add_reading(parser)


def add_reading(parser: argparse.ArgumentParser) -> None:
    """How a run's text is read, and where."""
    parser.add_argument(
        "--data", type=Path, metavar="DATA_BIN", help="binarised data folder (the run's)"
    )
    parser.add_argument(
        "--segmented",
        action="store_true",
        help="the text is already tokenised and segmented for fairseq",
    )
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")


def resolve_model(args: argparse.Namespace) -> None:
    """Let --model stand for RUN, whose place FILE has then. Raises UserError for both, and for neither."""
    if args.model is None:
        if args.run_dir is None:
            raise UserError("Give a run folder, or an exported model by --model NAME.")
        return
    if args.file is not None:
        raise UserError(
            f"Give either a run folder or --model {args.model}, not both: leave {args.run_dir} out."
        )
    args.file = args.run_dir
    args.run_dir = named_model(args.model)


class TextModel(GeneratorHubInterface):
    """Raw text in, raw text out: `encode`, `generate` and `decode` of fairseq's hub interface.

    Args:
        config, task, models: as fairseq's `load_model_ensemble_and_task` gives them.
        codec: has `encode`, raw text → symbols between spaces, and `decode`, the other way.
    """

    def __init__(self, config: Any, task: Any, models: list[Any], codec: Any):
        super().__init__(config, task, models)
        self.codec = codec

    def apply_bpe(self, sentence: str) -> str:
        """A raw line as the model's symbols."""
        return self.codec.encode(sentence)

    def remove_bpe(self, sentence: str) -> str:
        """The model's symbols as a raw line."""
        return self.codec.decode(sentence)


def load(args: argparse.Namespace, kind: str) -> TextModel:
    """The model that the flags of `add_arguments` name, in evaluation mode on its device.

    Args:
        args: the flags.
        kind: of its data set, as of `codec_of`.

    Raises:
        UserError: where something is missing, or the data is not that of the model.
    """
    if args.output and args.file:
        refuse_overwriting(args.output, [args.file], "--output")
    if not args.run_dir.exists():
        raise UserError(f"{args.run_dir} does not exist. Give a run folder or a checkpoint.")
    checkpoint, data = checkpoint_and_data(args.run_dir, args.data)
    if data and is_binarised(data / "binarised"):  # the folder that `moa-fairseq prepare` made
        data = data / "binarised"
    saved = kept_text(checkpoint)
    data = saved if saved and not args.data else data
    if data is None or not data.is_dir():
        missing = f"--data {data}" if data else prepare_facts(args.run_dir).get("folder")
        problem = f"{args.run_dir} has no record of its data"
        if missing:
            problem = f"{missing} is not a folder"
        raise UserError(f"{problem}. Give the binarised folder of its training by --data.")
    warn_of(same_text(checkpoint, data.resolve(), named=args.data is not None), checkpoint, data)
    data = saved or data.resolve()
    codec = WordCodec() if args.segmented else codec_of(data, kind)
    overrides = {"data": str(data)}
    models, config, task = load_model_ensemble_and_task([str(checkpoint)], arg_overrides=overrides)
    config.dataset.max_tokens = 4096
    config.dataset.batch_size = BATCH
    return TextModel(config, task, models, codec).to(device_for(args.cpu)).eval()


def lines_of(args: argparse.Namespace) -> Iterator[list[tuple[int, str]]]:
    """Numbered lines in batches; single ones where somebody types. Raises UserError for a missing file."""
    if args.file is not None and (args.file.is_dir() or not args.file.exists()):
        reason = "is a folder" if args.file.is_dir() else "does not exist"
        raise UserError(f"{args.file} {reason}. Give a text file, or none for standard input.")
    if args.file is None and sys.stdin is None:  # `<&-`
        raise UserError(
            "Standard input is closed. Give a text FILE, or redirect a file with `< FILE`."
        )
    typed = args.file is None and sys.stdin.isatty()
    # a carriage return within a line ends none: what comes out has a line for each one that `prepare` sees
    # nor does a byte that is no UTF-8: its line alone is left out
    text: dict[str, Any] = {"encoding": "utf-8-sig", "newline": "\n", "errors": "surrogateescape"}
    source = contextlib.nullcontext(sys.stdin) if args.file is None else args.file.open(**text)
    with source as stream:
        # Whose setting may let odd bytes in
        if args.file is None and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(**text)
        numbered = ((number, line.rstrip("\r\n")) for number, line in enumerate(stream, 1))
        yield from chunks(numbered, 1 if typed else BATCH)


def answers(args: argparse.Namespace) -> Any:
    """Context of the stream that is written to: --output's, else standard output. Raises UserError."""
    if args.output:
        return atomic_write(args.output)
    if sys.stdout is None:  # `>&-`
        raise UserError("Standard output is closed. Give a file by --output.")
    return contextlib.nullcontext(sys.stdout)


def shown(text: str, stream: Any) -> str:
    """Text of a model as it is, but to a terminal without orders for that terminal."""
    return printable(text) if stream.isatty() else text


def status_of(left_out: int) -> int:
    """The exit status: 1 where lines were left out, which is said again at the end."""
    if left_out:
        skipped = "1 line was skipped; its output line is empty"
        if left_out > 1:
            skipped = f"{left_out:,} lines were skipped; their output lines are empty"
        log.warning(skipped)
    return int(left_out > 0)


def hypotheses(
    model: TextModel,
    batch: list[tuple[int, str]],
    settings: dict[str, Any],
    room: int | None = None,
) -> Iterator[tuple[torch.Tensor | None, list[dict[str, Any]]]]:
    """What a model answers to a batch of lines.

    A warning names a line that is too long, one that is not UTF-8, and one with a word that is a symbol of
    the model, which have no hypotheses. `<unk>` is a word like any unknown one.

    Args:
        model: with its codec.
        batch: numbered lines of raw text; the numbers are for the warnings.
        settings: of the search: further arguments of fairseq's `generate`, such as beam.
        room: how many symbols a line may have; None: as many as the model reads.

    Returns:
        (symbols, fairseq's hypotheses, best first) for every line, no hypotheses of one that is left out;
        (None, []) for an empty one.
    """
    limit = model.max_positions
    most = room or (limit[0] if isinstance(limit, tuple) else limit)
    borders = {model.src_dict.bos(), model.src_dict.pad(), model.src_dict.eos()}
    tokens: dict[int, torch.Tensor] = {}
    left_out: dict[int, torch.Tensor] = {}
    for number, line in batch:
        if not line.strip():
            continue
        try:
            line.encode()
        except UnicodeEncodeError:
            log.warning("line %d is skipped: it is not UTF-8; convert it with iconv", number)
            left_out[number] = torch.empty(0, dtype=torch.long)
            continue
        symbols = model.encode(line)
        reason = ""
        if len(symbols) > most:
            reason = f"it has {len(symbols)} symbols, but the model reads at most {most}; split it"
        elif borders.intersection(symbols[:-1].tolist()):
            reason = "<s>, <pad> and </s> are symbols of the model, not words; write &lt;s&gt; or the like"
        if reason:
            log.warning("line %d is skipped: %s", number, reason)
        (left_out if reason else tokens)[number] = symbols
    results = iter(model.generate(list(tokens.values()), **settings) if tokens else [])
    for number, _ in batch:
        yield (tokens[number], next(results)) if number in tokens else (left_out.get(number), [])
