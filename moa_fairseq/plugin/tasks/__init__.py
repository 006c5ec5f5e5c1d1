"""The tasks (--task): block coordinate descent, texts read in order, sentences batched by length."""

from moa_fairseq.plugin.tasks import (
    block_coordinate_descent,
    language_modeling_truncated_bptt,
    sentence_prediction_by_length,
)

__all__ = [
    "block_coordinate_descent",
    "language_modeling_truncated_bptt",
    "sentence_prediction_by_length",
]
