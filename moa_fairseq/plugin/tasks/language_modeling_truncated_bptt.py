"""`--task language_modeling_truncated_bptt`: texts are read in order, each chunk with the chunk before it."""

import itertools
import logging
from dataclasses import dataclass
from typing import Any

from fairseq.data import BaseWrapperDataset, FairseqDataset, iterators
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II

from moa_fairseq.errors import UserError
from moa_fairseq.layers.settings import flag
from moa_fairseq.plugin.carried_context import ChunkContext, gather_contexts

logger = logging.getLogger(__name__)


@dataclass
class TruncatedBPTTConfig(LanguageModelingConfig):
    """fairseq's language modelling flags and the length of the context."""

    carried_chunks: int = flag(
        1,
        "number of earlier chunks of --tokens-per-sample tokens that self-attention also sees "
        "(Transformer-XL's memory segments; 0: none, but chunks are still read in order)",
    )
    seed: int = II("common.seed")
    update_freq: list[int] = II("optimization.update_freq")  # noqa: RUF009 (as fairseq writes it)
    train_subset: str = II("dataset.train_subset")


class OrderedChunks(BaseWrapperDataset):
    """A split as texts that are read side by side, each as `chunks` consecutive chunks.

    Blocks 0 … chunks − 1 of the data set are the first text, and so on; the last text may be shorter. The
    texts are divided into equal `parts`, which take turns: each process has some of the parts, and reads them
    one after the other; all parts together read one chunk of every text. A batch contains the numbers of its
    chunk and its part.

    Args:
        dataset: a data set of blocks, in the order of the text.
        texts: the number of texts, at most the number of blocks.
        parts: the number of groups of texts that take turns, a divisor of `texts`.
    """

    def __init__(self, dataset: FairseqDataset, texts: int, parts: int = 1):
        super().__init__(dataset)
        self.texts = max(1, min(texts, len(dataset)))
        self.chunks = -(-len(dataset) // self.texts)
        self.parts = parts
        self.texts_per_part = self.texts // parts

    def parts_of(self, shard: int, num_shards: int) -> range:
        """The parts that a process (shard) reads, one after the other.

        Args:
            shard: the number of the process.
            num_shards: the number of processes, a divisor of `parts`.
        """
        size = self.parts // num_shards
        return range(shard * size, (shard + 1) * size)

    def batches(self, num_shards: int) -> list[list[int]]:
        """The numbers of the blocks of each batch.

        Args:
            num_shards: the number of processes, a divisor of `parts`.

        Returns:
            A list of block numbers for each batch; every num_shards-th batch belongs to the same process. A
            list is empty if its texts have ended.
        """
        # One part of each process, then the next part of each
        parts = sorted(range(self.parts), key=lambda part: part % (self.parts // num_shards))
        batches = []
        for chunk, part in itertools.product(range(self.chunks), parts):
            first = part * self.texts_per_part
            texts = range(first, first + self.texts_per_part)
            blocks = [text * self.chunks + chunk for text in texts]
            batches.append([block for block in blocks if block < len(self.dataset)])
        return batches

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.dataset.collater(samples)
        if batch:
            text, chunk = divmod(int(samples[0]["id"]), self.chunks)
            batch["net_input"].update(chunk=chunk, part=text // self.texts_per_part)
        return batch


@register_task("language_modeling_truncated_bptt", dataclass=TruncatedBPTTConfig)
class TruncatedBPTTTask(LanguageModelingTask):
    """Language modelling over contiguous batches (Transformer-XL, Dai et al., arXiv 1901.02860, §3.2).

    --batch-size texts (or --max-tokens / --tokens-per-sample) are read side by side. In training
    --update-freq times as many are read, and each micro-batch of an update has its own texts. A batch
    continues where the last batch of its texts ended, in training and in evaluation, and its self-attentions
    also see the --carried-chunks before it. The models must be those of this package, with --positions xl or
    rope.

    A checkpoint from the middle of an epoch holds the context of all texts in its extra_state, as
    "carried_context": layers · --carried-chunks · --tokens-per-sample · texts · width numbers. A training
    that is resumed from it equals an uninterrupted one, also with another number of processes if these read
    the same texts.
    """

    reads_any_length = True  # positions are relative, and no chunk is left out
    _carried: dict[str, Any] | None = None  # the context for the next checkpoint

    @classmethod
    def setup_task(cls, args: Any, **kwargs: Any) -> "TruncatedBPTTTask":
        """Build the task.

        Raises:
            UserError: if the number of chunks is negative, or --sample-break-mode is not none.
        """
        if args.carried_chunks < 0:
            raise UserError(
                f"--carried-chunks is {args.carried_chunks}: give 0 or a positive number."
            )
        if args.sample_break_mode not in (None, "none"):
            raise UserError(
                f"--sample-break-mode {args.sample_break_mode}: consecutive chunks are cut from one text, so "
                "leave the flag out, or give none."
            )
        return super().setup_task(args, **kwargs)

    def build_model(self, args: Any, from_checkpoint: bool = False) -> Any:
        """Build the model, and let it carry a context.

        Raises:
            UserError: if the model cannot carry a context.
        """
        model = super().build_model(args, from_checkpoint)
        carry = getattr(getattr(model, "decoder", None), "carry_context", None)
        if carry is None:
            raise UserError(
                "--task language_modeling_truncated_bptt carries context between chunks, which this "
                "model does not support: choose an --arch of moa_fairseq (a dense one is "
                "transformer_xl_lm_47m), or --task language_modeling."
            )
        carry(self.args.carried_chunks)
        return model

    def train_step(
        self,
        sample: Any,
        model: Any,
        criterion: Any,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
    ) -> Any:
        """fairseq's step; a batch that a process repeats only to take part does not change the contexts."""
        if ignore_grad:
            inputs = dict(sample["net_input"])
            inputs.pop("chunk", None)
            inputs.pop("part", None)
            sample = sample | {"net_input": inputs}
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def before_save(self, trainer: Any, epoch_itr: iterators.EpochBatchIterator) -> None:
        """Collect the contexts of all processes, unless the next chunk begins an epoch."""
        self._carried = None
        context = trainer.get_model().decoder.context
        if context is None or epoch_itr.end_of_epoch():
            return
        parts = epoch_itr.dataset.parts_of(epoch_itr.shard_id, epoch_itr.num_shards)
        gathered = gather_contexts([context.of_training(part) for part in parts])
        if gathered is not None:
            self._carried = self._division(epoch_itr.dataset) | gathered._asdict()

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """fairseq's hook: the state that the first process adds to a checkpoint."""
        carried = self._carried
        self._carried = None
        return {} if carried is None else {"carried_context": carried}

    def after_load(
        self, trainer: Any, epoch_itr: iterators.EpochBatchIterator, extra_state: dict[str, Any]
    ) -> None:
        """Restore the context of this process's texts, or warn that the checkpoint has none.

        Args:
            trainer: fairseq's trainer.
            epoch_itr: the iterator, at the place in the epoch at which the training resumes.
            extra_state: the checkpoint's extra state, from which the context is removed.
        """
        # fairseq keeps extra_state in memory during the training.
        carried = extra_state.pop("carried_context", None)
        context = trainer.get_model().decoder.context
        place = epoch_itr.iterations_in_epoch
        if context is None or place == 0:
            return
        ordered = epoch_itr.dataset
        parts = ordered.parts_of(epoch_itr.shard_id, epoch_itr.num_shards)
        last_chunk = place / len(parts) - 1
        expected = self._division(ordered) | {"chunk": last_chunk}
        if not isinstance(carried, dict) or not expected.items() <= carried.items():
            state = "holds none"
            if carried is not None:
                state = "holds that of texts which were cut otherwise"
            logger.warning(
                f"the next chunk is read without the --carried-chunks before it: the checkpoint {state}. The "
                "training will differ a little from one that was not interrupted"
            )
            return
        longest = context.chunks * self.args.tokens_per_sample
        for part in parts:
            texts = slice(part * ordered.texts_per_part, (part + 1) * ordered.texts_per_part)
            inputs = [x[-longest:, texts].to(trainer.device, copy=True) for x in carried["inputs"]]
            if inputs[0].size(1):
                context.restore(part, ChunkContext(carried["chunk"], inputs))

    def _division(self, ordered: OrderedChunks) -> dict[str, int]:
        """How the training's texts are divided; a saved context fits texts that are divided alike."""
        return {
            "texts": ordered.texts,
            "chunks": ordered.chunks,
            "length": self.args.tokens_per_sample,
        }

    def eval_lm_dataloader(self, *args: Any, context_window: int = 0, **kwargs: Any) -> Any:
        """The chunks in order, each with its carried context.

        Raises:
            UserError: if --context-window is given as well.
        """
        if context_window > 0:
            raise UserError(
                "--context-window does not combine with a carried context: leave --context-window "
                "out, or slide a window over the text with --task language_modeling."
            )
        return super().eval_lm_dataloader(*args, **kwargs)

    def get_batch_iterator(
        self,
        dataset: FairseqDataset,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        *args: Any,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        **kwargs: Any,
    ) -> iterators.EpochBatchIterator:
        """An iterator over the batches in the order of the texts.

        Raises:
            UserError: if there are fewer texts than processes times micro-batches, --max-tokens is less than
                a chunk, or the number of micro-batches of an update changes during the training.
        """
        length = self.args.tokens_per_sample
        limits = [max_sentences, None if max_tokens is None else max_tokens // length]
        limit = min((limit for limit in limits if limit is not None), default=1)
        if limit < 1:
            raise UserError(
                f"--max-tokens {max_tokens} is less than one chunk of --tokens-per-sample {length}: raise it."
            )
        is_training = dataset is self.datasets.get(self.args.train_subset)
        micro_batches = self._micro_batches() if is_training else 1
        parts = num_shards * micro_batches
        texts_per_part = max(1, min(limit, len(dataset) // parts))
        ordered = OrderedChunks(dataset, texts_per_part * parts, parts)
        if ordered.texts < parts:
            raise UserError(
                f"{len(dataset)} chunks of --tokens-per-sample {length} are too few for {num_shards} "
                f"processes with --update-freq {micro_batches}: lower --tokens-per-sample or --update-freq."
            )
        return iterators.EpochBatchIterator(
            dataset=ordered,
            collate_fn=ordered.collater,
            batch_sampler=ordered.batches(num_shards),
            seed=self.args.seed,
            num_shards=num_shards,
            shard_id=shard_id,
            num_workers=num_workers,
            epoch=epoch,
            buffer_size=data_buffer_size,
            disable_shuffling=True,
        )

    def _micro_batches(self) -> int:
        """The number of micro-batches of an update.

        Raises:
            UserError: if the number changes during the training, because each micro-batch has its own texts.
        """
        numbers = set(self.args.update_freq)
        if len(numbers) > 1:
            raise UserError(
                f"--update-freq {','.join(map(str, self.args.update_freq))}: the micro-batches of an update "
                "read different parts of the text, so give one number."
            )
        return int(numbers.pop())
