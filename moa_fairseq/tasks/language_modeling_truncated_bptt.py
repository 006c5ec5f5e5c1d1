"""`--task language_modeling_truncated_bptt`: texts are read in order, each chunk with the one before it."""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from fairseq.data import BaseWrapperDataset, FairseqDataset, iterators
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II

from moa_fairseq.errors import UserError


@dataclass
class TruncatedBPTTConfig(LanguageModelingConfig):
    """fairseq's language modelling flags and the length of the context."""

    carried_chunks: int = field(
        default=1,
        metadata={
            "help": "how many earlier chunks of --tokens-per-sample tokens self-attention also sees "
            "(Transformer-XL; 0: none, but chunks are still read in order)"
        },
    )
    seed: int = II("common.seed")


class OrderedChunks(BaseWrapperDataset):
    """A split as `rows` texts that are read side by side, each in `chunks` chunks, one after the other.

    Blocks 0 … chunks − 1 of the data set are the first text, and so on; the last text may be shorter.
    `batches` are the blocks that are read together, and a batch of them knows its chunk.
    """

    def __init__(self, dataset: FairseqDataset, rows: int):
        super().__init__(dataset)
        self.rows = max(1, min(rows, len(dataset)))
        self.chunks = -(-len(dataset) // self.rows)

    def batches(self, num_shards: int) -> List[List[int]]:
        """Blocks of each batch, shard by shard. A shard keeps its texts; num_shards divides rows."""
        per_shard, total = self.rows // num_shards, len(self.dataset)
        first_blocks = range(0, self.rows * self.chunks, self.chunks)
        shards = [first_blocks[shard * per_shard : (shard + 1) * per_shard] for shard in range(num_shards)]
        return [
            [first + chunk for first in shard if first + chunk < total]
            for chunk in range(self.chunks)
            for shard in shards
        ]

    def collater(self, samples: List[Dict[str, Any]]) -> Dict[str, Any]:
        batch = self.dataset.collater(samples)
        if batch:
            batch["net_input"]["chunk"] = int(samples[0]["id"]) % self.chunks
        return batch


@register_task("language_modeling_truncated_bptt", dataclass=TruncatedBPTTConfig)
class TruncatedBPTTTask(LanguageModelingTask):
    """Language modelling over contiguous batches (Transformer-XL, Dai et al., arXiv 1901.02860, §3.2).

    --batch-size texts (or --max-tokens / --tokens-per-sample) are read side by side; a batch goes on
    where the batch before ended, in training and in evaluation, and its self-attentions also see the
    --carried-chunks before it. It takes the models of this package, with --positions xl or rope.
    """

    @classmethod
    def setup_task(cls, args: Any, **kwargs: Any) -> "TruncatedBPTTTask":
        if args.carried_chunks < 0:
            raise UserError(f"--carried-chunks {args.carried_chunks} must not be negative.")
        if args.sample_break_mode not in (None, "none"):
            raise UserError(
                f"--sample-break-mode {args.sample_break_mode}: consecutive chunks are cut from one text, so "
                "leave the flag out, or give none."
            )
        return super().setup_task(args, **kwargs)

    def build_model(self, args: Any, from_checkpoint: bool = False) -> Any:
        model = super().build_model(args, from_checkpoint)
        carry = getattr(getattr(model, "decoder", None), "carry_context", None)
        if carry is None:
            raise UserError(
                "--task language_modeling_truncated_bptt carries a context into the attention, which this "
                "model does not take: choose an --arch of moa_fairseq (a dense one is "
                "transformer_xl_lm_47m), or --task language_modeling."
            )
        carry(self.args.carried_chunks)
        return model

    def eval_lm_dataloader(self, *args: Any, context_window: int = 0, **kwargs: Any) -> Any:
        """Chunks in order, each with its carried context. Raises UserError for a context window as well."""
        if context_window > 0:
            raise UserError(
                "--context-window and a carried context are two ways to look back: leave --context-window "
                "out, or slide a window over the text with --task language_modeling."
            )
        return super().eval_lm_dataloader(*args, **kwargs)

    def get_batch_iterator(
        self,
        dataset: FairseqDataset,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        *args: Any,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        **kwargs: Any,
    ) -> iterators.EpochBatchIterator:
        """Batches in order. Raises UserError if there is not one text for each process."""
        length = self.args.tokens_per_sample
        limits = [max_sentences, None if max_tokens is None else max_tokens // length]
        per_shard = min((limit for limit in limits if limit is not None), default=1)
        if per_shard < 1:
            raise UserError(
                f"--max-tokens {max_tokens} is less than one chunk of --tokens-per-sample {length}."
            )
        per_shard = max(1, min(per_shard, len(dataset) // num_shards))
        ordered = OrderedChunks(dataset, per_shard * num_shards)
        if ordered.rows < num_shards:
            raise UserError(
                f"{len(dataset)} chunks of --tokens-per-sample {length} are too few for {num_shards} "
                "processes."
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
