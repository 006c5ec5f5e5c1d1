"""Tasks that train mixtures by block coordinate descent."""

from moa_fairseq.tasks import language_modeling_bcd, translation_bcd

__all__ = ["language_modeling_bcd", "translation_bcd"]
