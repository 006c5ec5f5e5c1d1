"""The choices of --task: block coordinate descent, texts read in order, sentences batched by length."""

from moa_fairseq.tasks import (
    language_modeling_bcd,
    language_modeling_truncated_bptt,
    sentence_prediction_by_length,
    translation_bcd,
)

__all__ = [
    "language_modeling_bcd",
    "language_modeling_truncated_bptt",
    "sentence_prediction_by_length",
    "translation_bcd",
]
