"""What --task names: block coordinate descent, and texts that are read in order."""

from moa_fairseq.tasks import language_modeling_bcd, language_modeling_truncated_bptt, translation_bcd

__all__ = ["language_modeling_bcd", "language_modeling_truncated_bptt", "translation_bcd"]
