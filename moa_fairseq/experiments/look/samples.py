"""The text of a page, as batches that a model reads: translations of its sentences, or text to continue."""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.gpt2_files import encoder_of
from moa_fairseq.experiments.inference.text_model import BATCH, TextModel, answers, lines_of
from moa_fairseq.experiments.scoring.fill_mask import symbols_of
from moa_fairseq.experiments.scoring.trained_model import batches, load_subset

log = logging.getLogger(__name__)
MAX_TOKENS = 4096  # the largest number of tokens of a batch from the data


class Sources(NamedTuple):
    """Where the sentences come from.

    Args:
        file: a text file with one sentence per line, or None.
        subset: the name of the subset of the binarised data that is read if there is no file.
        data: the binarised folder.
        limit: how many sentences are shown at most.
    """

    file: Path | None
    subset: str
    data: Path
    limit: int


class Sample(NamedTuple):
    """A batch of B sentences, padded to T symbols.

    Args:
        numbers: the number of each sentence in its text, from 1.
        net_input: fairseq's arguments of the model; "src_tokens" has the symbols that the encoder or the
            language model reads, "prev_output_tokens" those that the decoder of a translation model reads.
        target: the symbol whose surprise is measured at each position, [B, T].
        reference: of a translation, which is a batch of its own, the symbols of the reference, [R], if the
            text has one.
    """

    numbers: Sequence[int]
    net_input: dict[str, Any]
    target: Tensor
    reference: Tensor | None = None


def kind_of_model(model: TextModel) -> str:
    """What a model is for: "translation", "causal" or "masked" language modelling.

    Args:
        model: the model of a run.

    Raises:
        UserError: for a model of another kind.
    """
    network = model.models[0]
    if hasattr(model.task, "mask_idx"):
        return "masked"
    if not hasattr(network, "encoder"):
        return "causal"
    if hasattr(network, "decoder"):
        return "translation"
    raise UserError(
        f"{type(model.task).__name__}: a page shows translation, causal and masked language models. "
        "`moa-fairseq analyze` has numbers of other models."
    )


def samples(model: TextModel, sources: Sources, settings: dict[str, Any]) -> Iterator[Sample]:
    """The text of a page as batches; a warning names each line that the model cannot read.

    Args:
        model: a translation model or a language model.
        sources: where the sentences come from.
        settings: the settings of the search for translations, as `generation` returns them.

    Raises:
        UserError: for text that cannot be read.
    """
    kind = kind_of_model(model)
    if kind == "translation":
        if sources.file is None:
            return _translations_of_subset(model, sources, settings)
        return _translations_of_lines(model, sources.file, settings)
    if sources.file is None:
        return _batches_of_subset(model, sources.subset, is_masked=kind == "masked")
    if kind == "causal":
        return _causal_lines(model, sources.file)
    return _masked_lines(model, sources.file, sources.data)


def _translations_of_lines(
    model: TextModel, file: Path, settings: dict[str, Any]
) -> Iterator[Sample]:
    """Each line that the model can read, with its best translation."""
    for batch in lines_of(file):
        for (number, _), answer in zip(batch, answers(model, batch, settings)):
            if answer.hypotheses:
                yield _translation(number, answer.symbols, answer.hypotheses)


def _translations_of_subset(
    model: TextModel, sources: Sources, settings: dict[str, Any]
) -> Iterator[Sample]:
    """The first sentences of a subset that the model can read, with their best translations."""
    dataset = load_subset(model.task, sources.subset)
    count = min(len(dataset), sources.limit)
    longest = model.longest_source
    indices = [index for index in range(count) if dataset.size(index)[0] <= longest]
    for start in range(0, len(indices), BATCH):
        batch = indices[start : start + BATCH]
        items = [dataset[index] for index in batch]
        outputs = model.generate([item["source"] for item in items], **settings)
        for index, item, translations in zip(batch, items, outputs):
            yield _translation(index + 1, item["source"], translations, item.get("target"))


def _translation(
    number: int, source: Tensor, translations: list[dict[str, Any]], reference: Tensor | None = None
) -> Sample:
    """A sentence with the best of its translations, which the decoder reads (teacher forcing)."""
    target = translations[0]["tokens"].cpu()[None]
    net_input = {
        "src_tokens": source[None],
        "src_lengths": torch.tensor([len(source)]),
        # The decoder reads </s>, the last symbol, first
        "prev_output_tokens": target.roll(1),
    }
    return Sample([number], net_input, target, reference)


def _causal_lines(model: TextModel, file: Path) -> Iterator[Sample]:
    """The lines of a file, each as a batch of its own."""
    for number, symbols in _encoded_lines(model, file, model.encode):
        # The model reads the end of the line before, and predicts the first symbol of this line
        yield Sample([number], {"src_tokens": symbols.roll(1)[None]}, symbols[None])


def _masked_lines(model: TextModel, file: Path, data: Path) -> Iterator[Sample]:
    """Lines without masks: at each position, the target is the symbol that the model reads."""
    encoder = encoder_of(data)

    def encode(line: str) -> Tensor:
        return symbols_of([line], encoder, model.src_dict)

    for number, symbols in _encoded_lines(model, file, encode):
        yield Sample([number], {"src_tokens": symbols[None]}, symbols[None])


def _encoded_lines(
    model: TextModel, file: Path, encode: Callable[[str], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """(number, symbols [T]) of each line that a language model can read."""
    limit = model.models[0].max_positions()
    for number, line in itertools.chain.from_iterable(lines_of(file)):
        try:
            line.encode()
        except UnicodeEncodeError:
            log.warning("line %d is skipped: it is not UTF-8; convert it with iconv", number)
            continue
        if not line.strip():
            log.warning("line %d is skipped: it is empty", number)
            continue
        symbols = encode(line)
        if len(symbols) > limit:
            problem = "line %d is skipped: it has %d symbols, and the model reads at most %d"
            log.warning(problem, number, len(symbols), limit)
        else:
            yield number, symbols


def _batches_of_subset(model: TextModel, subset: str, is_masked: bool) -> Iterator[Sample]:
    """The batches of a subset for a language model."""
    first = 1
    cpu = torch.device("cpu")
    for batch in batches(model.task, model.models[0], subset, MAX_TOKENS, cpu):
        net_input = batch["net_input"]
        target = batch["target"]
        if is_masked:
            # The targets are the symbols that fairseq masked, and padding elsewhere
            is_hidden = target.ne(model.src_dict.pad())
            target = torch.where(is_hidden, target, net_input["src_tokens"])
            net_input = {"src_tokens": target}
        end = first + len(target)
        yield Sample(range(first, end), net_input, target)
        first = end
