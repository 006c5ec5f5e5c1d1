"""`--task sentence_prediction_by_length`: fairseq's classification of sentences with less padding."""

from dataclasses import dataclass
from typing import Any

from fairseq.data import SortDataset
from fairseq.tasks import register_task
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from omegaconf import II


@dataclass
class SentencePredictionByLengthConfig(SentencePredictionConfig):
    """fairseq's flags of sentence prediction."""

    seed: int = II("common.seed")


@register_task("sentence_prediction_by_length", dataclass=SentencePredictionByLengthConfig)
class SentencePredictionByLengthTask(SentencePredictionTask):
    """fairseq's task with batches of sentences of similar length, as in translation.

    fairseq's own task mixes all lengths, and pads every batch to its longest sentence.
    """

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> SortDataset:
        mixed = super().load_dataset(split, combine, **kwargs)
        if isinstance(mixed, SortDataset):  # with --no-shuffle it is another data set
            # The last key is the primary one; sentences of equal length stay in random order.
            self.datasets[split] = SortDataset(
                mixed.dataset, [*mixed.sort_order, mixed.dataset.sizes[0]]
            )
        return self.datasets[split]
