"""Text processing faithful to Moses' Perl scripts."""

from moa_fairseq.text.normalize import normalize_punctuation, remove_nonprinting, replace_unicode_punctuation
from moa_fairseq.text.tokenizer import detokenize, tokenize

__all__ = [
    "detokenize",
    "normalize_punctuation",
    "remove_nonprinting",
    "replace_unicode_punctuation",
    "tokenize",
]
