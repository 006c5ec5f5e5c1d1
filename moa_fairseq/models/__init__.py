"""Thin fairseq subclasses that choose an attention, and the named architectures."""

from moa_fairseq.models import translation

__all__ = ["translation"]
