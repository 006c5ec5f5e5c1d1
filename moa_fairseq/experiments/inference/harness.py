"""A causal language model of fairseq as a model of lm-evaluation-harness, with its run's segmentation."""

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

_LOGITS = 1 << 25  # the largest number of logits in memory at once
_UNSUPPORTED = (
    "A task of --tasks generates text or scores whole texts (output_type generate_until or "
    "loglikelihood_rolling), but only tasks that compare given answers are supported. Leave it out."
)


class Read(NamedTuple):
    """A model's predictions of the last n symbols of a text.

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
        self.chunk = model.cfg.task.tokens_per_sample
        self.carries_context = getattr(self.network.decoder, "context", None) is not None
        if not self.carries_context:
            self.chunk = min(self.chunk, self.network.max_positions())
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
        ids: list[int] = []
        for number, line in enumerate(string.split("\n") if self.has_lines else [string]):
            symbols = self.text_model.codec.encode(line)
            encoded = self.dictionary.encode_line(symbols, add_if_not_exist=False, append_eos=False)
            if number:
                ids.append(self.eot_token_id)
            ids += [
                self.dictionary.unk() if index in borders else index for index in encoded.tolist()
            ]
        return ids

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
        windows = []
        for texts, context, continuation in requests:
            if not continuation:
                raise UserError(
                    f"A task has the continuation {texts[1]!r} after a context that ends in "
                    f"{texts[0][-40:]!r}, but it adds no symbol to the context in the model's "
                    "segmentation. Begin the continuation with a space (target_delimiter)."
                )
            if context[:1] != [self.eot_token_id]:
                context = [self.eot_token_id, *context]
            inputs = [*context, *continuation[:-1]]
            if not self.carries_context:
                if len(continuation) > self.chunk:
                    raise UserError(
                        f"A task has a continuation of {len(continuation)} symbols, but the model reads at "
                        f"most {self.chunk}: {texts[1][:60]!r}. Leave the task out."
                    )
                inputs = inputs[-self.chunk :]
            windows.append((inputs, continuation))
        answers: dict[int, tuple[float, bool]] = {}
        for number, read in self._reads(windows, disable_tqdm):
            target = windows[number][1]
            greedy = read.likeliest.tolist() == target and self.dictionary.unk() not in target
            answers[number] = (read.log_probs.sum().item(), greedy)
            self.cache_hook.add_partial("loglikelihood", requests[number][0], answers[number])
        return [answers[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Raises UserError: only continuations are scored."""
        raise UserError(_UNSUPPORTED)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Raises UserError: only continuations are scored."""
        raise UserError(_UNSUPPORTED)

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
            too_long = len(context) + len(target) > self.chunk
            facts["cut"] += too_long and not self.carries_context
        return facts

    def _batches(self, rows: Sequence[list[int]]) -> Iterator[list[int]]:
        """The indices of rows, the longest row first, in batches of at most max_tokens symbols per chunk."""
        batch: list[int] = []
        for number in sorted(range(len(rows)), key=lambda number: -len(rows[number])):
            if batch and (len(batch) + 1) * min(self.chunk, len(rows[batch[0]])) > self.max_tokens:
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _reads(
        self, windows: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool
    ) -> Iterator[tuple[int, Read]]:
        """The index of each window, (inputs, targets), with the predictions of its targets."""
        with tqdm(total=len(windows), desc="Scoring", disable=disable_tqdm or None) as bar:
            for batch in self._batches([inputs for inputs, _ in windows]):
                inputs, targets = zip(*(windows[number] for number in batch))
                yield from zip(batch, self._read(inputs, targets))
                bar.update(len(batch))

    @torch.no_grad()
    def _read(self, inputs: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Read]:
        """The predictions of the targets of each row.

        Args:
            inputs: the symbols that the model reads, from the beginning of a text or of its window; the first
                row is the longest.
            targets: the symbols that are scored; the last one follows the last input of the row.
        """
        reads: list[list[Read]] = [[] for _ in inputs]
        for number, start in enumerate(range(0, len(inputs[0]), self.chunk)):
            rows = [
                torch.tensor(row[start : start + self.chunk]) for row in inputs if len(row) > start
            ]
            tokens = collate_tokens(rows, self.dictionary.pad()).to(self.text_model.device)
            chunk = {"chunk": number} if self.carries_context else {}
            features = self.network(tokens, features_only=True, **chunk)[0]  # [B, T, C]
            scored_features = []
            scored: list[int] = []
            sizes = []
            # As the longest row is first, the rows that end before this chunk are the last
            for x, row, source, target in zip(features, rows, inputs, targets):
                # Where the target begins, in the chunk
                first = len(source) - len(target) - start
                begin = min(max(0, first), len(row))
                scored_features.append(x[begin : len(row)])
                scored += target[begin - first : len(row) - first]
                sizes.append(len(row) - begin)
            if not scored:
                continue
            read = self._output(
                torch.cat(scored_features), torch.tensor(scored, device=features.device)
            )
            by_row = zip(reads, read.log_probs.split(sizes), read.likeliest.split(sizes))
            for reads_of_row, log_probs, likeliest in by_row:
                reads_of_row.append(Read(log_probs, likeliest))
        return [Read(*map(torch.cat, zip(*reads_of_row))) for reads_of_row in reads]

    def _output(self, features: Tensor, targets: Tensor) -> Read:
        """The predictions at n positions, from their features, [n, C], and the symbols that follow, [n]."""
        decoder = self.network.decoder
        step = max(1, _LOGITS // len(self.dictionary))
        outputs = []
        for x, target in zip(features.split(step), targets.split(step)):
            if decoder.adaptive_softmax is not None:
                log_probs = decoder.adaptive_softmax.get_log_prob(x[None], None)[0]
            else:
                logits = decoder.output_layer(x)
                log_probs = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
            outputs.append(
                (log_probs.gather(1, target[:, None])[:, 0].cpu(), log_probs.argmax(-1).cpu())
            )
        return Read(*(torch.cat(parts) for parts in zip(*outputs)))
