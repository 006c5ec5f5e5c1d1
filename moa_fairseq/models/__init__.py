"""Thin fairseq subclasses that choose an attention, and the named architectures."""

from moa_fairseq.models import causal_lm, mae_translation, roberta, translation

__all__ = ["causal_lm", "mae_translation", "roberta", "translation"]
