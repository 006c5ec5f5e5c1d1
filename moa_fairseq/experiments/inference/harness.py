"""A causal language model of fairseq as a model of lm-evaluation-harness, with its run's segmentation."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from fairseq.data.data_utils import collate_tokens
from lm_eval.api.model import TemplateLM
from torch import Tensor
from tqdm import tqdm

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.inference.text_codec import PieceCodec
from moa_fairseq.experiments.inference.text_model import TextModel

_MAX_LOGITS = 1 << 25  # the largest number of logits in memory at once
_UNSUPPORTED = (
    "The task {} of --tasks generates text or scores whole texts (output_type generate_until or "
    "loglikelihood_rolling), but only tasks that compare given answers are supported. Leave it out."
)


class Window(NamedTuple):
    """What the model reads of a text, and what is scored.

    Args:
        inputs: the symbols that the model reads.
        targets: the symbols that are scored; the last one follows the last input.
    """

    inputs: list[int]
    targets: list[int]


class Predictions(NamedTuple):
    """A model's predictions of n symbols of a text.

    Args:
        log_probs: the natural logarithm of the probability of each symbol, [n].
        likeliest: the likeliest symbol at each position, [n] int64.
    """

    log_probs: Tensor
    likeliest: Tensor


class HarnessModel(TemplateLM):
    """The model that lm_eval calls: log-probabilities of continuations.

    Every text follows `</s>`, as in training and in fairseq-eval-lm. A model that carries a context
    (--carried-chunks) reads a text of any length from its beginning, in chunks of --tokens-per-sample
    symbols. Any other model reads at most that many symbols: the end of a longer context.

    Args:
        model: the model, as `text_model.load` returns it.
        max_tokens: the largest number of symbols of a batch, including padding.
    """

    def __init__(self, model: TextModel, max_tokens: int = 4096):
        super().__init__()
        self.text_model = model
        self.network = model.models[0]
        self.dictionary = model.task.source_dictionary
        self.max_tokens = max_tokens
        self.chunk_length = model.cfg.task.tokens_per_sample
        self.carries_context = getattr(self.network.decoder, "context", None) is not None
        if not self.carries_context:
            self.chunk_length = min(self.chunk_length, self.network.max_positions())
        # Pieces have no symbol for the end of a line
        self.has_lines = not isinstance(model.codec, PieceCodec)

    @property
    def eot_token_id(self) -> int:
        return int(self.dictionary.eos())

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The symbols of a text, without `</s>` around it; `<unk>` for symbols that the dictionary lacks.

        Args:
            string: raw text. For words and bytes, a line feed becomes `</s>`, the end of a line.
            add_special_tokens, kwargs: lm_eval passes them to all models; they have no effect here.
        """
        borders = {self.dictionary.bos(), self.dictionary.pad(), self.dictionary.eos()}
        lines = string.split("\n") if self.has_lines else [string]
        ids: list[int] = []
        for line in lines:
            symbols = self.text_model.codec.encode(line)
            encoded = self.dictionary.encode_line(symbols, add_if_not_exist=False, append_eos=False)
            for index in encoded.tolist():
                ids.append(self.dictionary.unk() if index in borders else index)
            ids.append(self.eot_token_id)
        return ids[:-1]  # the last line has no end

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """For each (texts, context, continuation): Σ log p of the continuation, and whether it is greedy.

        A continuation is greedy if each of its symbols is the likeliest. One with `<unk>` never counts as
        greedy, because the model cannot produce such a word.

        Raises:
            UserError: for a continuation without symbols, or with more symbols than the model reads.
        """
        windows = [self._window(*request) for request in requests]
        answers: dict[int, tuple[float, bool]] = {}
        for number, predictions in self._predict_windows(windows, disable_tqdm):
            texts, _, continuation = requests[number]
            is_likeliest = predictions.likeliest.tolist() == continuation
            greedy = is_likeliest and self.dictionary.unk() not in continuation
            answers[number] = (predictions.log_probs.sum().item(), greedy)
            self.cache_hook.add_partial("loglikelihood", texts, answers[number])
        return [answers[number] for number in range(len(requests))]

    def _window(
        self, texts: tuple[str, str], context: list[int], continuation: list[int]
    ) -> Window:
        """The window of a request; raises as `_loglikelihood_tokens`."""
        if not continuation:
            raise UserError(
                f"A task has the continuation {texts[1]!r} after a context that ends in "
                f"{texts[0][-40:]!r}, but it adds no symbol to the context in the model's "
                "segmentation. Begin the continuation with a space (target_delimiter)."
            )
        begin = [] if context[:1] == [self.eot_token_id] else [self.eot_token_id]
        inputs = [*begin, *context, *continuation[:-1]]
        if not self.carries_context:
            if len(continuation) > self.chunk_length:
                raise UserError(
                    f"A task has a continuation of {len(continuation)} symbols, but the model reads at "
                    f"most {self.chunk_length}: {texts[1][:60]!r}. Leave the task out."
                )
            inputs = inputs[-self.chunk_length :]
        return Window(inputs, continuation)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Raises UserError: only continuations are scored."""
        raise UserError(_UNSUPPORTED.format(requests[0].task_name))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Raises UserError: only continuations are scored."""
        raise UserError(_UNSUPPORTED.format(requests[0].task_name))

    def text_facts(self, requests: Sequence[tuple[str, str]]) -> dict[str, int]:
        """Counts of a task's symbols in the segmentation of the model.

        Args:
            requests: the arguments of lm_eval's requests: (context, continuation).

        Returns:
            "requests", their number; "symbols", the number of symbols in all texts; "unknown", the number of
            `<unk>` among them; "unknown_targets", the number of requests whose continuation has an `<unk>`;
            "cut", the number of requests whose context is too long for the model.
        """
        facts = dict.fromkeys(("requests", "symbols", "unknown", "unknown_targets", "cut"), 0)
        unknown = self.dictionary.unk()
        for context_text, continuation in requests:
            if context_text:
                context, target = self._encode_pair(context_text, continuation)
            else:
                context, target = [], self.tok_encode(continuation)
            facts["requests"] += 1
            facts["symbols"] += len(context) + len(target)
            facts["unknown"] += context.count(unknown) + target.count(unknown)
            facts["unknown_targets"] += unknown in target
            too_long = len(context) + len(target) > self.chunk_length
            facts["cut"] += too_long and not self.carries_context
        return facts

    def _batches(self, rows: Sequence[list[int]]) -> Iterator[list[int]]:
        """The indices of rows, the longest row first, in batches of at most max_tokens symbols per chunk."""
        batch: list[int] = []
        longest = 0  # of the batch, in one chunk
        for index in sorted(range(len(rows)), key=lambda index: len(rows[index]), reverse=True):
            if batch and (len(batch) + 1) * longest > self.max_tokens:
                yield batch
                batch = []
            if not batch:
                longest = min(self.chunk_length, len(rows[index]))
            batch.append(index)
        if batch:
            yield batch

    def _predict_windows(
        self, windows: Sequence[Window], disable_tqdm: bool
    ) -> Iterator[tuple[int, Predictions]]:
        """The index of each window with the predictions of its targets, batch by batch."""
        with tqdm(total=len(windows), desc="Scoring", disable=disable_tqdm or None) as bar:
            for batch in self._batches([window.inputs for window in windows]):
                yield from zip(batch, self._predict([windows[number] for number in batch]))
                bar.update(len(batch))

    @torch.no_grad()
    def _predict(self, batch: Sequence[Window]) -> list[Predictions]:
        """The predictions of the targets of each window; the first window must be the longest."""
        scored: list[list[Tensor]] = [[] for _ in batch]  # features of each window
        for start in range(0, len(batch[0].inputs), self.chunk_length):
            stop = start + self.chunk_length
            # The windows that end before this chunk are the last
            active = [window for window in batch if len(window.inputs) > start]
            rows = [torch.tensor(window.inputs[start:stop]) for window in active]
            tokens = collate_tokens(rows, self.dictionary.pad()).to(self.text_model.device)
            if self.carries_context:
                chunk = start // self.chunk_length
                features = self.network(tokens, features_only=True, chunk=chunk)[0]  # [B, T, C]
            else:
                features = self.network(tokens, features_only=True)[0]
            for window, window_features, parts in zip(active, features, scored):
                # Of inputs </s> a b c with the targets c d, positions 2 and 3 are scored; in the chunk that
                # starts at 2 they are 0 and 1
                end = len(window.inputs) - start
                begin = max(0, end - len(window.targets))
                parts.append(window_features[begin:end].clone())  # a view would keep all features
        features = torch.cat(list(itertools.chain.from_iterable(scored)))
        targets = list(itertools.chain.from_iterable(window.targets for window in batch))
        predictions = self._output(features, torch.tensor(targets, device=self.text_model.device))
        sizes = [len(window.targets) for window in batch]
        by_window = zip(predictions.log_probs.split(sizes), predictions.likeliest.split(sizes))
        return [Predictions(*pair) for pair in by_window]

    def _output(self, features: Tensor, targets: Tensor) -> Predictions:
        """The predictions at n positions, from their features, [n, C], and the symbols that follow, [n]."""
        decoder = self.network.decoder
        step = max(1, _MAX_LOGITS // len(self.dictionary))
        parts = []
        for x, target in zip(features.split(step), targets.split(step)):
            if decoder.adaptive_softmax is not None:
                log_probs = decoder.adaptive_softmax.get_log_prob(x[None], None)[0]
            else:
                logits = decoder.output_layer(x)
                log_probs = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
            of_targets = log_probs.gather(1, target[:, None])[:, 0]
            parts.append((of_targets.cpu(), log_probs.argmax(-1).cpu()))
        return Predictions(*map(torch.cat, zip(*parts)))
