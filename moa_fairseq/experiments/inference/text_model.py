"""A trained run as fairseq's hub interface, with the run's own treatment of text."""

import argparse
import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.hub_utils import GeneratorHubInterface

from moa_fairseq.errors import UserError, printable
from moa_fairseq.experiments.data.binarised import is_binarised
from moa_fairseq.experiments.data.text_files import (
    BINARISED,
    run_copy_of,
    unverified_text_files,
    warn_of_unverified,
)
from moa_fairseq.experiments.inference.export import named_model
from moa_fairseq.experiments.inference.text_codec import WordCodec, codec_of
from moa_fairseq.experiments.recipes.checkpoints import checkpoint_and_data, prepare_facts
from moa_fairseq.experiments.scoring.trained_model import device_for
from moa_fairseq.files import atomic_write, refuse_overwriting
from moa_fairseq.text.workers import chunks

log = logging.getLogger(__name__)
BATCH = 64  # lines that are read before the first of them is answered, unless somebody types them


def add_arguments(parser: argparse.ArgumentParser, content: str) -> None:
    """Add the flags for the run, its text and how the text is read.

    Args:
        parser: the parser of a command.
        content: what FILE is, for its help.
    """
    add = parser.add_argument
    add(
        "run_dir",
        type=Path,
        nargs="?",
        metavar="RUN",
        help="run folder, exported model, or checkpoint with --data",
    )
    add("file", type=Path, nargs="?", metavar="FILE", help=f"{content} (standard input)")
    add(
        "--model",
        metavar="NAME",
        help="exported model by name instead of RUN, in $MOA_FAIRSEQ_MODELS or ~/.cache/moa_fairseq/models",
    )
    add("--output", type=Path, metavar="FILE", help="output file (standard output)")
    add_reading(parser)


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Add the flags for how a run's text is read, and on which device the model runs."""
    add = parser.add_argument
    add("--data", type=Path, metavar="DATA_BIN", help="binarised data folder (the run's)")
    add(
        "--segmented",
        action="store_true",
        help="the text is already tokenised and segmented for fairseq",
    )
    add("--cpu", action="store_true", help="do not use a GPU")


def resolve_model(args: argparse.Namespace) -> None:
    """Put the folder of --model in the place of RUN; with --model the first argument is FILE.

    Args:
        args: the flags of `add_arguments`, which are changed in place.

    Raises:
        UserError: if both RUN and --model are given, or neither.
    """
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
        config, task, models: what fairseq's `load_model_ensemble_and_task` returns.
        codec: has two methods: `encode` turns raw text into symbols separated by spaces, `decode` does the
            opposite.
    """

    def __init__(self, config: Any, task: Any, models: list[Any], codec: Any):
        super().__init__(config, task, models)
        self.codec = codec

    @property
    def longest_source(self) -> int:
        """The largest number of symbols that the model reads."""
        limit = self.max_positions  # of the source and the target in translation
        return limit[0] if isinstance(limit, tuple) else limit

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
        kind: the kind of its data set, as `codec_of` takes it.

    Raises:
        UserError: in the cases of `load_run`, and if --output is FILE.
    """
    if args.output and args.file:
        refuse_overwriting(args.output, [args.file], "--output")
    return load_run(args.run_dir, args.data, None if args.segmented else kind, args.cpu)


def load_run(run_dir: Path, data: Path | None, kind: str | None, cpu: bool) -> TextModel:
    """The model of a run, in evaluation mode on its device.

    Args:
        run_dir: the run folder, the exported model or the checkpoint.
        data: the binarised folder that --data names; None: the run's.
        kind: the kind of its data set, as `codec_of` takes it; None if the text is already segmented.
        cpu: whether the model stays on the CPU.

    Raises:
        UserError: if the model or its data is missing, or the data is not that of the model.
    """
    if not run_dir.exists():
        raise UserError(f"{run_dir} does not exist. Give a run folder or a checkpoint.")
    checkpoint, folder = checkpoint_and_data(run_dir, data)
    run_copy = run_copy_of(checkpoint)
    if data is None and run_copy:
        folder = run_copy
    folder = _binarised_folder(folder, run_dir)
    unverified = unverified_text_files(checkpoint, folder.resolve(), named=data is not None)
    warn_of_unverified(unverified, checkpoint, folder)
    # Even with --data, whose text is the same, the run's copy has all that the model needs
    text = run_copy or folder.resolve()
    codec = WordCodec() if kind is None else codec_of(text, kind)
    models, config, task = load_model_ensemble_and_task([str(checkpoint)], {"data": str(text)})
    config.dataset.max_tokens = 4096
    config.dataset.batch_size = BATCH
    return TextModel(config, task, models, codec).to(device_for(cpu)).eval()


def _binarised_folder(folder: Path | None, run_dir: Path) -> Path:
    """The binarised folder of a run's data; UserError if there is none.

    Args:
        folder: the folder of the data, which `moa-fairseq prepare` may have made; None: there is no record.
        run_dir: the run folder, for the error.
    """
    if folder and is_binarised(folder / BINARISED):
        return folder / BINARISED
    if folder is None or not folder.is_dir():
        name = f"--data {folder}" if folder else prepare_facts(run_dir).get("folder")
        problem = f"{name} is not a folder" if name else f"{run_dir} has no record of its data"
        raise UserError(f"{problem}. Give the binarised folder of its training by --data.")
    return folder


def lines_of(path: Path | None) -> Iterator[list[tuple[int, str]]]:
    """The numbered lines of a text, in batches.

    Args:
        path: a text file, or None for standard input.

    Yields:
        Batches of (number from 1, line without its end). If somebody types the lines, each is a batch.

    Raises:
        UserError: if the file does not exist, or standard input is closed.
    """
    if path is not None and (path.is_dir() or not path.exists()):
        reason = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {reason}. Give a text file, or none for standard input.")
    if path is None and sys.stdin is None:  # `<&-`
        raise UserError(
            "Standard input is closed. Give a text FILE, or redirect a file with `< FILE`."
        )
    typed = path is None and sys.stdin.isatty()
    source = contextlib.nullcontext(sys.stdin) if path is None else path.open()
    with source as stream:
        # UTF-8 in any locale. Only a line feed ends a line, so the output has as many lines as `prepare`
        # sees. A line that is not UTF-8 is left out by `answers`
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8-sig", newline="\n", errors="surrogateescape")
        numbered = ((number, line.rstrip("\r\n")) for number, line in enumerate(stream, 1))
        yield from chunks(numbered, 1 if typed else BATCH)


def open_output(args: argparse.Namespace) -> Any:
    """A context with the output stream: the file of --output, else standard output.

    Raises:
        UserError: if there is no --output and standard output is closed.
    """
    if args.output:
        return atomic_write(args.output)
    if sys.stdout is None:  # `>&-`
        raise UserError("Standard output is closed. Give a file by --output.")
    return contextlib.nullcontext(sys.stdout)


def shown(text: str, stream: Any) -> str:
    """A model's text as it is written to a stream: a terminal gets no control characters."""
    return printable(text) if stream.isatty() else text


def status_of(left_out: int) -> int:
    """The exit status: 1 if lines were left out. A last warning repeats how many."""
    if left_out:
        lines = "1 line was" if left_out == 1 else f"{left_out:,} lines were"
        log.warning(f"{lines} skipped (an empty line of output for each)")
    return int(left_out > 0)


class Answer(NamedTuple):
    """The model's answer to a line.

    Args:
        symbols: the symbols of the line, [T]; none if the line is empty or left out.
        hypotheses: fairseq's hypotheses, the best first; none without symbols.
        is_left_out: whether the model cannot read the line.
    """

    symbols: torch.Tensor
    hypotheses: list[dict[str, Any]]
    is_left_out: bool


def answers(
    model: TextModel,
    batch: list[tuple[int, str]],
    settings: dict[str, Any],
    max_symbols: int | None = None,
) -> Iterator[Answer]:
    """The translations or completions of a batch of lines.

    A line is left out, with a warning, if it is too long, is not UTF-8, or has <s>, <pad> or </s> as a word.
    `<unk>` is read like any unknown word.

    Args:
        model: the model with its codec.
        batch: numbered lines of raw text; the numbers are for the warnings.
        settings: further arguments of fairseq's `generate`, such as beam.
        max_symbols: how many symbols a line may have; None: as many as the model reads.
    """
    encoded = []
    for number, line in batch:
        symbols = torch.empty(0, dtype=torch.long)
        if line.strip():
            try:
                symbols = _encode(model, line, max_symbols or model.longest_source)
            except UserError as error:  # the line cannot be read
                log.warning(f"line {number} is skipped: {error}")
        encoded.append(symbols)
    sources = list(filter(len, encoded))
    results = iter(model.generate(sources, **settings) if sources else [])
    for (_, line), symbols in zip(batch, encoded):
        hypotheses = next(results) if len(symbols) else []
        yield Answer(symbols, hypotheses, bool(line.strip()) and not hypotheses)


def _encode(model: TextModel, line: str, longest: int) -> torch.Tensor:
    """The symbols of a line. Raise UserError for a line that the model cannot read."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise UserError("it is not UTF-8; convert it with iconv") from error
    symbols: torch.Tensor = model.encode(line)
    if len(symbols) > longest:
        raise UserError(
            f"it has {len(symbols)} symbols, but the model reads at most {longest}; split it"
        )
    borders = {model.src_dict.bos(), model.src_dict.pad(), model.src_dict.eos()}
    if borders.intersection(symbols[:-1].tolist()):
        raise UserError(
            "<s>, <pad> and </s> are symbols of the model, not words; write &lt;s&gt; or the like"
        )
    return symbols
