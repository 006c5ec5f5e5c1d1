"""Thin fairseq subclasses that choose an attention, and the named architectures."""

from moa_fairseq.models import roberta, translation

__all__ = ["roberta", "translation"]
