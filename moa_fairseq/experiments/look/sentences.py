"""The sentences of a page: a model's translation or text, the experts of each token, and its surprise."""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import sacrebleu
import torch
from fairseq import utils
from torch import Tensor

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.attention_pass import pass_with_weights
from moa_fairseq.experiments.inference.text_model import TextModel
from moa_fairseq.experiments.look.routes import Budget, RecordedPass, Router, routers_of
from moa_fairseq.experiments.look.samples import Sample, kind_of_model
from moa_fairseq.experiments.look.spelling import spelling_of
from moa_fairseq.experiments.scoring.text_marks import subword_kind
from moa_fairseq.experiments.scoring.trained_model import symbols_at
from moa_fairseq.text.codecs import WordCodec
from moa_fairseq.text.subwords import join_subwords

log = logging.getLogger(__name__)
STRIDE = 7  # a masked model guesses every seventh token of a pass: 14 %, as in training
CHRF = sacrebleu.CHRF()  # the score of a sentence


class Sentence(TypedDict, total=False):
    """A sentence as the page's JSON has it; only a translation has source, text, reference and score.

    Args:
        number: the number of the sentence in its text, from 1.
        source: the tokens of the sentence.
        source_glue: a string with "1" for each token that continues a word and "0" for the others.
        target: the tokens of the translation, or of a language model's text.
        target_glue: the same as `source_glue`, for the target.
        text: the translation as running text.
        reference: the reference as running text, if the text has one.
        score: the score of the translation against the reference (chrF).
        bits: the surprise of each target token; None for a token that the model does not predict.
        mean_bits: the mean surprise.
        routes: for each router what `Router.route` returns; None if the page has no space for experts.
    """

    number: int
    source: list[str]
    source_glue: str
    target: list[str]
    target_glue: str
    text: str
    reference: str
    score: float
    bits: list[float | None]
    mean_bits: float
    routes: list[dict[str, list[int]]] | None


class SentenceReader:
    """Reads what a page shows of sentences from a model's passes over them.

    Args:
        model: a translation model or a language model.
        data: the binarised folder, which may have the files of GPT-2's encoding.
        budget: how many bytes the sentences may take on the page.

    Attributes:
        routers: the routers of the model, once a sentence was read.
    """

    def __init__(self, model: TextModel, data: Path, budget: Budget) -> None:
        self.model = model
        self.network = model.models[0]
        self.kind = kind_of_model(model)
        self.routers: list[Router] = []
        self.budget = budget
        self.dictionaries = {"source": model.src_dict, "target": model.tgt_dict}
        self.spell = {
            side: spelling_of(model, dictionary, data)
            for side, dictionary in self.dictionaries.items()
        }

    def sentences(self, samples: Iterator[Sample], limit: int) -> Iterator[Sentence]:
        """The sentences of batches, until the page is full.

        Args:
            samples: the batches.
            limit: how many sentences are shown at most.
        """
        all_sentences = itertools.chain.from_iterable(map(self._sentences_of, samples))
        for sentence in itertools.islice(all_sentences, limit):
            self.budget.spend(sentence)
            if self.budget.is_spent:
                log.warning(
                    "the page has its largest size: sentences from %d on are left out",
                    sentence["number"],
                )
                return
            yield sentence

    def _sentences_of(self, sample: Sample) -> Iterator[Sentence]:
        """The sentences of one batch."""
        source = sample.net_input["src_tokens"]
        sides = {"source": source, "target": sample.net_input.get("prev_output_tokens", source)}
        recorded, output = self._forward(sample.net_input)
        if not self.routers:
            self.routers = routers_of(self.network, recorded, self.kind == "translation")
        if self.kind == "masked":
            surprise = self._masked_surprise(source)
        else:
            surprise = self._surprise(output, sample.target)
        for row, number in enumerate(sample.numbers):
            tokens = {side: symbols[row] for side, symbols in sides.items()}
            is_token = {side: ids.ne(self.dictionaries[side].pad()) for side, ids in tokens.items()}
            if not is_token["target"].any():
                continue
            sentence: Sentence = {"number": number}
            if self.kind == "translation":
                spelling = self._shown("source", tokens["source"][is_token["source"]])
                sentence["source"], sentence["source_glue"] = spelling
                self._add_texts(sentence, sample)
            spelling = self._shown("target", tokens["target"][is_token["target"]])
            sentence["target"], sentence["target_glue"] = spelling
            bits = surprise[row][is_token["target"]]
            sentence["bits"] = [round(value, 2) for value in bits.tolist()]
            if self.kind != "masked":
                # The surprise at a position is that of the next token, and nothing predicts the first
                sentence["bits"] = [None, *sentence["bits"][:-1]]
            sentence["mean_bits"] = round(bits.mean().item(), 3)
            sentence["routes"] = self._routes(recorded, row, is_token)
            yield sentence

    def _shown(self, side: str, tokens: Tensor) -> tuple[list[str], str]:
        """The texts of tokens, and a string with "1" for each that continues a word."""
        spelled = self.spell[side](symbols_at(self.dictionaries[side], tokens))
        glue = "".join(str(int(token.is_glued)) for token in spelled)
        return [token.text for token in spelled], glue

    def _routes(
        self, recorded: RecordedPass, row: int, is_token: dict[str, Tensor]
    ) -> list[dict[str, list[int]]] | None:
        """What each router chose for a sentence, as far as the budget allows."""
        if not self.budget.has_experts:
            return None
        routes = []
        for router in self.routers:
            mask = is_token[router.queries]
            routes.append(router.route(recorded, row, mask, self.budget.has_keys))
        return routes

    def _add_texts(self, sentence: Sentence, translation: Sample) -> None:
        """Add a translation and its reference as running text, with the score."""
        sentence["text"] = self._running_text(translation.target[0])
        if translation.reference is not None:
            sentence["reference"] = self._running_text(translation.reference)
            score = CHRF.sentence_score(sentence["text"], [sentence["reference"]])
            sentence["score"] = round(score.score, 1)

    def _running_text(self, tokens: Tensor) -> str:
        """Symbols of the target language as running text."""
        text = self.model.decode(tokens)
        if isinstance(self.model.codec, WordCodec):  # which leaves subwords as they are
            return join_subwords(text, subword_kind([text]))
        return text

    def _forward(self, net_input: dict[str, Any]) -> tuple[RecordedPass, Any]:
        """One pass of the model: its attention weights and routings, and its output."""
        if self.model.device.type == "cuda":
            net_input = utils.move_to_cuda(net_input)
        weights, routings, output = pass_with_weights(self.network, net_input, features_only=False)
        recorded = RecordedPass(weights, dict(routings), net_input["src_tokens"].size(0))
        return recorded, output

    @torch.no_grad()
    def _masked_surprise(self, tokens: Tensor) -> Tensor:
        """The surprise of each token in bits, [B, T]: of STRIDE passes, each masks every STRIDE-th token."""
        surprise = torch.empty(tokens.shape)
        for start in range(STRIDE):
            masked = tokens.clone()
            guessed = masked[:, start::STRIDE]  # a view, through which `masked` changes
            guessed[guessed.ne(self.model.src_dict.pad())] = self.model.task.mask_idx
            output = self.network(masked.to(self.model.device))
            surprise[:, start::STRIDE] = self._surprise(output, tokens)[:, start::STRIDE]
        return surprise

    @torch.no_grad()
    def _surprise(self, output: Any, target: Tensor) -> Tensor:
        """−log₂ p of each target, [B, T] float32 on the CPU; 0 for a target that is padding."""
        log_probs = self.network.get_normalized_probs(output, log_probs=True).float().cpu()
        nats = -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return nats.masked_fill(target.eq(self.model.tgt_dict.pad()), 0.0) / math.log(2)


def score_signature() -> str:
    """sacreBLEU's signature of the sentences' scores; at least one sentence must have been scored."""
    return str(CHRF.get_signature())


def check_pairing(
    first: Sequence[Sentence], second: Sequence[Sentence], names: Sequence[str]
) -> None:
    """Check that two runs were given the same text.

    Args:
        first, second: the sentences of each run.
        names: the names of the two runs.

    Raises:
        UserError: with the number of the first sentence that differs.
    """
    for left, right in zip(first, second):
        side: Literal["source", "target"] = "source" if "source" in left else "target"
        is_same = _text(left[side]) == _text(right.get(side, ()))
        if left["number"] != right["number"] or not is_same:
            raise UserError(
                f"Sentence {left['number']} of {names[0]} is not that of {names[1]}: their texts differ. "
                "Give both the same text by --input FILE."
            )


def _text(tokens: Sequence[str]) -> str:
    return "".join(tokens).replace("</s>", "")
