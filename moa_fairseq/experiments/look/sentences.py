"""The sentences of a page: a model's translation or text, the experts of each token, and its surprise."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sacrebleu
import torch
from fairseq import utils
from fairseq.data.encoders.gpt2_bpe_utils import get_encoder
from torch import Tensor

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.attention_maps import pass_with_weights
from moa_fairseq.experiments.data.gpt2_files import bpe_files, obtain_gpt2_files
from moa_fairseq.experiments.inference.text_model import BATCH, TextModel, hypotheses, lines_of
from moa_fairseq.experiments.look.routes import Budget, RecordedPass, Routers
from moa_fairseq.experiments.look.spelling import spelling_of
from moa_fairseq.experiments.scoring.fill_mask import symbols_of
from moa_fairseq.experiments.scoring.text_marks import subword_kind
from moa_fairseq.experiments.scoring.trained_model import batches, load_subset, symbols_at
from moa_fairseq.experiments.tables import values_of
from moa_fairseq.text.codecs import WordCodec
from moa_fairseq.text.subwords import join_subwords

log = logging.getLogger(__name__)
STRIDE = 7  # a masked model guesses every seventh token of a pass: 14 %, as in training
MAX_TOKENS = 4096  # the largest number of tokens of a batch from the data
_CHRF = sacrebleu.CHRF()


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


class Translation(NamedTuple):
    """A sentence and its best translation, as symbols with the end of the sentence.

    Args:
        number: the number of the sentence in its text, from 1.
        source: the symbols of the sentence, [S].
        target: the symbols of its translation, [T].
        reference: the symbols of the reference translation, [R], or None where the text has none.
    """

    number: int
    source: Tensor
    target: Tensor
    reference: Tensor | None


class Sample(NamedTuple):
    """A batch of B sentences for a language model, padded to T symbols.

    Args:
        numbers: the number of each sentence in its text, from 1.
        net_input: fairseq's arguments of the model; "src_tokens" has the symbols that it reads, [B, T].
        target: the symbol whose surprise is measured at each position, [B, T].
    """

    numbers: Sequence[int]
    net_input: dict[str, Any]
    target: Tensor


def score_signature() -> str:
    """sacreBLEU's signature of the sentences' scores; at least one sentence must have been scored."""
    return str(_CHRF.get_signature())


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


def settings_of(model: TextModel) -> Any:
    """The settings of a model's task; their `data` is the path of the binarised folder.

    Args:
        model: the model of a run.
    """
    return model.task.cfg or model.task.args  # the task of truncated BPTT has no cfg


def sentences(
    model: TextModel, sources: Sources, settings: dict[str, Any], routers: Routers, budget: Budget
) -> Iterator[dict[str, Any]]:
    """The sentences as the page's JSON has them.

    Args:
        model: a translation model or a language model.
        sources: where the sentences come from.
        settings: the settings of the search for translations, as `generation` returns them.
        routers: the routers of the model; the first pass fills them.
        budget: how many bytes the sentences may take on the page.

    Returns:
        A dictionary for each sentence: its number, from 1; the tokens of "source" (translation only) and
        "target"; "source_glue" and "target_glue", a string with "1" for each token that continues a word and
        "0" for the others; "bits", the surprise of each target token; "mean_bits"; "routes" as
        `Routers.routes` returns them; of a translation also its text, the reference and the score.

    Raises:
        UserError: for text that cannot be read.
    """
    kind = kind_of_model(model)
    if kind == "translation":
        rows = _read_translations(model, _translations(model, sources, settings), routers, budget)
    else:
        samples = {"masked": _masked_samples, "causal": _causal_samples}[kind](model, sources)
        rows = _read_samples(model, samples, routers, budget)
    spellings = {
        "source": spelling_of(model, model.src_dict, sources.data),
        "target": spelling_of(model, model.tgt_dict, sources.data),
    }
    for sentence in itertools.islice(rows, sources.limit):
        for side, spell in spellings.items():
            if side in sentence:
                spelled = spell(sentence[side])
                sentence[side] = [token.text for token in spelled]
                sentence[f"{side}_glue"] = "".join(str(int(token.is_glued)) for token in spelled)
        budget.spend(sentence)
        if budget.is_spent:
            log.warning(
                "the page has its largest size: sentences from %d on are left out",
                sentence["number"],
            )
            return
        yield sentence


def _translations(
    model: TextModel, sources: Sources, settings: dict[str, Any]
) -> Iterator[Translation]:
    if sources.file is not None:
        for batch in lines_of(sources.file):
            for (number, _), (symbols, found) in zip(batch, hypotheses(model, batch, settings)):
                if symbols is not None and found:
                    yield Translation(number, symbols, found[0]["tokens"].cpu(), None)
        return
    dataset = load_subset(model.task, sources.subset)
    longest = model.max_positions
    limit = longest[0] if isinstance(longest, tuple) else longest
    count = min(len(dataset), sources.limit)
    indices = [index for index in range(count) if dataset.size(index)[0] <= limit]
    for start in range(0, len(indices), BATCH):
        items = [dataset[index] for index in indices[start : start + BATCH]]
        outputs = model.generate(values_of(items, "source"), **settings)
        for index, item, found in zip(indices[start:], items, outputs):
            target = found[0]["tokens"].cpu()
            yield Translation(index + 1, item["source"], target, item.get("target"))


def _read_translations(
    model: TextModel, translations: Iterator[Translation], routers: Routers, budget: Budget
) -> Iterator[dict[str, Any]]:
    """Translations with the experts and the surprise of their tokens, by a pass with teacher forcing."""
    for number, source, target, reference in translations:
        shifted = torch.cat([target.new_tensor([model.tgt_dict.eos()]), target[:-1]])
        net_input = {
            "src_tokens": source[None],
            "src_lengths": torch.tensor([len(source)]),
            "prev_output_tokens": shifted[None],
        }
        recorded, output = _forward(model, net_input, routers)
        surprise = _surprise(model, output, target[None])
        tokens = {"source": slice(None), "target": slice(None)}
        sentence: dict[str, Any] = {
            "number": number,
            "source": symbols_at(model.src_dict, source),
            "target": symbols_at(model.tgt_dict, shifted),
            "text": _running_text(model, target),
            "bits": [None, *_rounded(surprise[0][:-1])],
            "mean_bits": round(surprise[0].mean().item(), 3),
            "routes": routers.routes(recorded, 0, tokens, budget),
        }
        if reference is not None:
            sentence["reference"] = _running_text(model, reference)
            score = _CHRF.sentence_score(sentence["text"], [sentence["reference"]])
            sentence["score"] = round(score.score, 1)
        yield sentence


def _running_text(model: TextModel, tokens: Tensor) -> str:
    """Symbols of the target language as running text."""
    text = model.decode(tokens)
    return join_subwords(text, subword_kind([text])) if isinstance(model.codec, WordCodec) else text


def _causal_samples(model: TextModel, sources: Sources) -> Iterator[Sample]:
    if sources.file is None:
        yield from _subset_samples(model, sources.subset)
        return
    for number, symbols in _encoded_lines(model, sources.file, model.encode):
        # The model reads the end of the line before, and predicts the first symbol of this line
        tokens = symbols.roll(1)[None]
        net_input = {"src_tokens": tokens, "src_lengths": torch.tensor([len(symbols)])}
        yield Sample([number], net_input, symbols[None])


def _masked_samples(model: TextModel, sources: Sources) -> Iterator[Sample]:
    """Samples without masks: at each position, the target is the symbol that the model reads."""
    if sources.file is None:
        for numbers, net_input, target in _subset_samples(model, sources.subset):
            # The targets of a subset are the symbols that fairseq masked, and padding elsewhere
            is_masked = target.ne(model.src_dict.pad())
            tokens = torch.where(is_masked, target, net_input["src_tokens"])
            yield Sample(numbers, {"src_tokens": tokens}, tokens)
        return
    files = bpe_files(sources.data) or obtain_gpt2_files([sources.data])[:2]
    encoder = get_encoder(*map(str, files))

    def encode(line: str) -> Tensor:
        return symbols_of([line], encoder, model.src_dict)

    for number, symbols in _encoded_lines(model, sources.file, encode):
        yield Sample([number], {"src_tokens": symbols[None]}, symbols[None])


def _encoded_lines(
    model: TextModel, file: Path, encode: Callable[[str], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """(number, symbols [T]) of each line that the model can read; a warning names each of the others."""
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
            continue
        yield number, symbols


def _subset_samples(model: TextModel, subset: str) -> Iterator[Sample]:
    count = 0
    cpu = torch.device("cpu")
    for batch in batches(model.task, model.models[0], subset, MAX_TOKENS, cpu):
        size = len(batch["target"])
        yield Sample(range(count + 1, count + 1 + size), batch["net_input"], batch["target"])
        count += size


def _read_samples(
    model: TextModel, samples: Iterator[Sample], routers: Routers, budget: Budget
) -> Iterator[dict[str, Any]]:
    """Sentences of a language model with the experts and the surprise of their tokens."""
    dictionary = model.tgt_dict
    is_masked = hasattr(model.task, "mask_idx")
    for numbers, net_input, target in samples:
        tokens = net_input["src_tokens"]
        recorded, output = _forward(model, net_input, routers)
        if is_masked:
            surprise = _masked_surprise(model, tokens)
        else:
            surprise = _surprise(model, output, target)
        for row, number in enumerate(numbers):
            real = tokens[row].ne(dictionary.pad())
            if not real.any():
                continue
            bits = surprise[row][real]
            yield {
                "number": number,
                "target": symbols_at(dictionary, tokens[row][real]),
                # A causal model's surprise at a position is that of the next token
                "bits": _rounded(bits) if is_masked else [None, *_rounded(bits[:-1])],
                "mean_bits": round(bits.mean().item(), 3),
                "routes": routers.routes(recorded, row, {"source": real, "target": real}, budget),
            }


def _forward(
    model: TextModel, net_input: dict[str, Any], routers: Routers
) -> tuple[RecordedPass, Any]:
    """One pass of the model: its attention weights and routings, and its output."""
    if model.device.type == "cuda":
        net_input = utils.move_to_cuda(net_input)
    weights, routings, output = pass_with_weights(model.models[0], net_input, features_only=False)
    recorded = RecordedPass(weights, routings, net_input["src_tokens"].size(0))
    routers.meet(recorded)
    return recorded, output


@torch.no_grad()
def _masked_surprise(model: TextModel, tokens: Tensor) -> Tensor:
    """The surprise of each token in bits, [B, T]: of STRIDE passes, each masks every STRIDE-th token."""
    surprise = torch.empty(tokens.shape)
    pad = model.src_dict.pad()
    for start in range(STRIDE):
        masked = tokens.clone()
        guessed = masked[:, start::STRIDE]
        guessed[guessed.ne(pad)] = model.task.mask_idx
        output = model.models[0](masked.to(model.device))
        surprise[:, start::STRIDE] = _surprise(model, output, tokens)[:, start::STRIDE]
    return surprise


@torch.no_grad()
def _surprise(model: TextModel, output: Any, target: Tensor) -> Tensor:
    """−log₂ p of each target, [B, T] float32 on the CPU; 0 for a target that is padding."""
    log_probs = model.models[0].get_normalized_probs(output, log_probs=True).float().cpu()
    target = target.cpu()
    nats = -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return nats.masked_fill(target.eq(model.tgt_dict.pad()), 0.0) / math.log(2)


def _rounded(bits: Tensor) -> list[float]:
    return [round(value, 2) for value in bits.tolist()]


def check_pairing(
    first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]], names: Sequence[str]
) -> None:
    """Check that two runs were given the same text.

    Args:
        first, second: the sentences of each run, as `sentences` returns them.
        names: the names of the two runs.

    Raises:
        UserError: with the number of the first sentence that differs.
    """
    for left, right in zip(first, second):
        side = "source" if "source" in left else "target"
        texts = []
        for sentence in (left, right):
            texts.append("".join(sentence.get(side, ())).replace("</s>", ""))
        if left["number"] != right["number"] or texts[0] != texts[1]:
            raise UserError(
                f"Sentence {left['number']} of {names[0]} is not that of {names[1]}: the test sets differ. "
                "Give both the same text by --input FILE."
            )
