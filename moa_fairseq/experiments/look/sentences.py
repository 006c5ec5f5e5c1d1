"""The sentences of a page: a model's translation or text, the experts of each token, and its surprise."""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sacrebleu
import torch
from fairseq import utils
from fairseq.data.encoders.gpt2_bpe_utils import get_encoder
from torch import Tensor

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.attention_maps import pass_with_weights
from moa_fairseq.experiments.analysis.expert_tokens import BEGINS, CONTINUES
from moa_fairseq.experiments.analysis.gpt2_pieces import Gpt2Pieces, gpt2_pieces
from moa_fairseq.experiments.data.gpt2_files import bpe_files, obtain_gpt2_files
from moa_fairseq.experiments.inference.text_model import BATCH, TextModel, hypotheses, lines_of
from moa_fairseq.experiments.look.routes import Budget, Routers
from moa_fairseq.experiments.scoring.fill_mask import symbols_of
from moa_fairseq.experiments.scoring.text_marks import subword_kind
from moa_fairseq.experiments.scoring.trained_model import batches, load_subset, symbols_at
from moa_fairseq.experiments.tables import values_of
from moa_fairseq.text.codecs import ByteCodec, WordCodec
from moa_fairseq.text.subwords import join_subwords

log = logging.getLogger(__name__)
STRIDE = 7  # a masked model guesses every seventh token of a pass: 14 %, like in training
_CHRF = sacrebleu.CHRF()

Symbols = Sequence[str]
# symbols → (text of each as it is shown, whether it continues the word before it)
Spelling = Callable[[Symbols], list[tuple[str, bool]]]


class Sources(NamedTuple):
    """Where the sentences come from.

    Args:
        file: with one sentence per line, or None.
        subset: of the binarised data, where there is no file.
        data: the binarised folder.
        most: how many to show.
    """

    file: Path | None
    subset: str
    data: Path
    most: int


def score_signature() -> str:
    """sacreBLEU's signature of a sentence's score; one must have been scored."""
    return str(_CHRF.get_signature())


def kind_of_model(model: TextModel) -> str:
    """What a model is for: "translation", "causal" or "masked" language modelling.

    Args:
        model: of a run.

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
    """The settings of a model's task, which has its data as `data`.

    Args:
        model: of a run.
    """
    return model.task.cfg or model.task.args  # the task of truncated BPTT


def spelling_of(model: TextModel, dictionary: Any, data: Path) -> Spelling:
    """How the symbols of a dictionary are shown.

    Args:
        model: with its codec.
        dictionary: the symbols.
        data: the binarised folder, which may have GPT-2's files.
    """
    if gpt2 := gpt2_pieces(model.task, data):
        return functools.partial(_ids, gpt2)
    if isinstance(model.codec, ByteCodec):
        return functools.partial(_bytes, model.codec)
    if any(symbol.startswith(BEGINS) for symbol in dictionary.symbols):
        return _pieces
    return _merges


def _ids(gpt2: Gpt2Pieces, symbols: Symbols) -> list[tuple[str, bool]]:
    spelled = []
    for text, _ in gpt2.pieces(symbols):
        spelled.append((text.strip() or text, not text.startswith((" ", "<"))))
    return spelled


def _bytes(codec: ByteCodec, symbols: Symbols) -> list[tuple[str, bool]]:
    return [(codec.decode(symbol) or symbol, True) for symbol in symbols]


def _pieces(symbols: Symbols) -> list[tuple[str, bool]]:
    spelled = []
    for symbol in symbols:
        is_glued = not symbol.startswith((BEGINS, "<"))
        spelled.append((symbol.removeprefix(BEGINS) or BEGINS, is_glued))
    return spelled


def _merges(symbols: Symbols) -> list[tuple[str, bool]]:
    spelled = []
    is_glued = False
    for symbol in symbols:
        spelled.append((symbol.removesuffix(CONTINUES) or symbol, is_glued))
        is_glued = symbol.endswith(CONTINUES)
    return spelled


def sentences(
    model: TextModel, sources: Sources, settings: dict[str, Any], routers: Routers, budget: Budget
) -> Iterator[dict[str, Any]]:
    """The sentences as the page's JSON has them.

    Args:
        model: of translation, or a language model.
        sources: where the sentences come from.
        settings: of the search for translations, as `generation` gives them.
        routers: of the model, which read the routings.
        budget: of the page's size.

    Returns:
        Of each sentence: number, from 1; tokens of "source" (translation) and "target", each with text and
        glue ("1" for a token that continues a word); bits of each target token; their mean; text, reference
        and score of a translation; routes, as `Routers.routes`.

    Raises:
        UserError: for text that cannot be read.
    """
    kind = kind_of_model(model)
    if kind == "translation":
        rows = _translations(model, sources, settings, routers, budget)
    else:
        rows = {"masked": _masked, "causal": _causal}[kind](model, sources, routers, budget)
    spellings = {
        "source": spelling_of(model, model.src_dict, sources.data),
        "target": spelling_of(model, model.tgt_dict, sources.data),
    }
    for sentence in itertools.islice(rows, sources.most):
        for side, spell in spellings.items():
            if side in sentence:
                spelled = spell(sentence[side])
                sentence[side] = [text for text, _ in spelled]
                sentence[f"{side}_glue"] = "".join(str(int(glued)) for _, glued in spelled)
        budget.spend(sentence)
        if budget.is_spent:
            log.warning(
                "the page has its largest size: sentences from %d on are left out",
                sentence["number"],
            )
            return
        yield sentence


def _pairs(
    model: TextModel, sources: Sources, settings: dict[str, Any]
) -> Iterator[tuple[Any, ...]]:
    """(number, source symbols [S], hypotheses, reference symbols or None)."""
    if sources.file is not None:
        numbered = lines_of(argparse.Namespace(file=sources.file))
        for batch in numbered:
            for (number, _), (symbols, answers) in zip(batch, hypotheses(model, batch, settings)):
                if symbols is not None and answers:
                    yield number, symbols, answers, None
        return
    dataset = load_subset(model.task, sources.subset)
    longest = model.max_positions
    limit = longest[0] if isinstance(longest, tuple) else longest
    places = [n for n in range(min(len(dataset), sources.most)) if dataset.size(n)[0] <= limit]
    for start in range(0, len(places), BATCH):
        items = [dataset[place] for place in places[start : start + BATCH]]
        outputs = model.generate(values_of(items, "source"), **settings)
        for place, item, best in zip(places[start:], items, outputs):
            yield place + 1, item["source"], best, item.get("target")


def _translations(
    model: TextModel, sources: Sources, settings: dict[str, Any], routers: Routers, budget: Budget
) -> Iterator[dict[str, Any]]:
    for number, source, answers, reference in _pairs(model, sources, settings):
        target = answers[0]["tokens"].cpu()
        shifted = torch.cat([target.new_tensor([model.tgt_dict.eos()]), target[:-1]])
        net_input = {
            "src_tokens": source[None],
            "src_lengths": torch.tensor([len(source)]),
            "prev_output_tokens": shifted[None],
        }
        surprise, routes = _read(model, net_input, target[None], routers, budget)
        sentence: dict[str, Any] = {
            "number": number,
            "source": symbols_at(model.src_dict, source),
            "target": symbols_at(model.tgt_dict, shifted),
            "text": _running(model, target),
            "bits": [None, *_rounded(surprise[0][:-1])],
            "mean_bits": round(surprise[0].mean().item(), 3),
            "routes": routes(0, slice(None), slice(None)),
        }
        if reference is not None:
            sentence["reference"] = _running(model, reference)
            score = _CHRF.sentence_score(sentence["text"], [sentence["reference"]])
            sentence["score"] = round(score.score, 1)
        yield sentence


def _running(model: TextModel, tokens: Tensor) -> str:
    """Symbols of the target language as running text."""
    text = model.decode(tokens)
    return join_subwords(text, subword_kind([text])) if isinstance(model.codec, WordCodec) else text


def _causal(
    model: TextModel, sources: Sources, routers: Routers, budget: Budget
) -> Iterator[dict[str, Any]]:
    dictionary = model.tgt_dict
    samples = _lines(model, sources, model.encode) if sources.file else _chunks(model, sources)
    for numbers, tokens, net_input, target in samples:
        if sources.file:  # from the end of the line before it
            target = tokens
            tokens = torch.cat([tokens[:, -1:], tokens[:, :-1]], 1)
            net_input = {"src_tokens": tokens, "src_lengths": torch.tensor([tokens.size(1)])}
        surprise, routes = _read(model, net_input, target, routers, budget)
        for row, number in enumerate(numbers):
            real = tokens[row].ne(dictionary.pad())
            if not real.any():
                continue
            bits = surprise[row][real]
            yield {
                "number": number,
                "target": symbols_at(dictionary, tokens[row][real]),
                "bits": [None, *_rounded(bits[:-1])],
                "mean_bits": round(bits.mean().item(), 3),
                "routes": routes(row, real, real),
            }


def _masked(
    model: TextModel, sources: Sources, routers: Routers, budget: Budget
) -> Iterator[dict[str, Any]]:
    """The experts of the whole text; a token's surprise where the model has to guess it and every seventh."""
    dictionary = model.src_dict
    if sources.file:
        data = Path(settings_of(model).data)
        files = bpe_files(data) or obtain_gpt2_files([data])[:2]
        encoder = get_encoder(*map(str, files))
        samples = _lines(model, sources, lambda line: symbols_of([line], encoder, dictionary))
    else:
        samples = _chunks(model, sources)
    for numbers, tokens, _, target in samples:
        if target is not None:  # what the data set masked
            tokens = torch.where(target.ne(dictionary.pad()), target, tokens)
        surprise, routes = _read(model, {"src_tokens": tokens}, tokens, routers, budget)
        for start in range(STRIDE):
            masked = tokens.clone()
            masked[:, start::STRIDE] = torch.where(
                tokens[:, start::STRIDE].eq(dictionary.pad()), dictionary.pad(), model.task.mask_idx
            )
            with torch.no_grad():
                output = model.models[0](masked.to(model.device))
            guessed = _surprise(model, output, tokens)
            surprise[:, start::STRIDE] = guessed[:, start::STRIDE]
        for row, number in enumerate(numbers):
            real = tokens[row].ne(dictionary.pad())
            bits = surprise[row][real]
            yield {
                "number": number,
                "target": symbols_at(dictionary, tokens[row][real]),
                "bits": _rounded(bits),
                "mean_bits": round(bits.mean().item(), 3),
                "routes": routes(row, real, real),
            }


def _lines(
    model: TextModel, sources: Sources, encode: Callable[[str], Tensor]
) -> Iterator[tuple[Iterable[int], Tensor, dict[str, Any], Any]]:
    """The lines of a file, each a batch of its own: (numbers, symbols [1, T], nothing, None)."""
    limit = model.models[0].max_positions()
    for batch in lines_of(argparse.Namespace(file=sources.file)):
        for number, line in batch:
            try:
                line.encode()
            except UnicodeEncodeError:
                log.warning("line %d is skipped: it is not UTF-8; convert it with iconv", number)
                continue
            symbols = encode(line)
            if not line.strip() or len(symbols) > limit:
                log.warning(
                    "line %d is skipped: it has %d symbols of at most %d",
                    number,
                    len(symbols),
                    limit,
                )
            else:
                yield [number], symbols[None], {}, None


def _chunks(
    model: TextModel, sources: Sources
) -> Iterator[tuple[Iterable[int], Tensor, dict[str, Any], Tensor]]:
    """Batches of a subset: (numbers, symbols [B, T], fairseq's arguments, targets [B, T])."""
    read = 0
    for sample in batches(model.task, model.models[0], sources.subset, 4096, torch.device("cpu")):
        tokens = sample["net_input"]["src_tokens"]
        numbers = range(read + 1, read + 1 + len(tokens))
        read += len(tokens)
        yield numbers, tokens, sample["net_input"], sample["target"]


def _read(
    model: TextModel, net_input: dict[str, Any], target: Tensor, routers: Routers, budget: Budget
) -> tuple[Tensor, Callable[..., list[Any] | None]]:
    """One pass: the surprise of each target in bits, [B, T], and what gives the routes of a row."""
    if model.device.type == "cuda":
        net_input = utils.move_to_cuda(net_input)
    weights, routings, output = pass_with_weights(model.models[0], net_input, features_only=False)
    routers.meet(weights, routings)
    size = net_input["src_tokens"].size(0)

    def routes(row: int, source: Any, target: Any) -> list[Any] | None:
        return routers.routes(
            weights, routings, row, size, {"source": source, "target": target}, budget
        )

    return _surprise(model, output, target), routes


@torch.no_grad()
def _surprise(model: TextModel, output: Any, target: Tensor) -> Tensor:
    """−log₂ p of each target, [B, T] float32 on the CPU; 0 for a target that is padding."""
    probs = model.models[0].get_normalized_probs(output, log_probs=True).float().cpu()
    pad = model.tgt_dict.pad()
    places = target.cpu().unsqueeze(-1)
    return -probs.gather(-1, places).squeeze(-1).masked_fill(target.cpu().eq(pad), 0.0) / math.log(
        2
    )


def _rounded(bits: Tensor) -> list[float]:
    return [round(value, 2) for value in bits.tolist()]


def check_pairing(
    first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]], names: Sequence[str]
) -> None:
    """Check that two runs were given the same text.

    Args:
        first, second: the sentences of both.
        names: of the runs.

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
