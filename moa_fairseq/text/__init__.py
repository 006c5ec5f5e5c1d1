"""Text processing faithful to Moses' Perl scripts, line by line or for whole files."""

from moa_fairseq.text.detokenizer import detokenize
from moa_fairseq.text.normalize import normalize_punctuation, remove_nonprinting, replace_unicode_punctuation
from moa_fairseq.text.pipeline import process_lines
from moa_fairseq.text.tokenizer import tokenize

__all__ = [
    "detokenize",
    "normalize_punctuation",
    "process_lines",
    "remove_nonprinting",
    "replace_unicode_punctuation",
    "tokenize",
]
