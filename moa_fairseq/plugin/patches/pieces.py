"""Bytes of SentencePiece become letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moa_fairseq.plugin.patches.table import patch
from moa_fairseq.text.subwords import with_letters

_TESTS = "plugin/patches/test_pieces.py::"


@patch("fairseq.data.data_utils:post_process", f"{_TESTS}test_bytes_become_letters")
def join_bytes(post_process: Callable, sentence: str, symbol: str | None) -> str:
    """Turn the bytes in a sentence of SentencePiece into letters.

    --remove-bpe sentencepiece prints the bytes of a model with byte fallback as text, such as <0xE3>.
    """
    if symbol == "sentencepiece":
        sentence = with_letters(sentence)
    return post_process(sentence, symbol)


@patch(
    "fairseq.data.encoders.sentencepiece_bpe:SentencepieceBPE.decode",
    f"{_TESTS}test_the_encoder_of_pieces_undoes_bytes",
)
def decode_bytes(decode: Callable, encoder: Any, x: str) -> str:
    """As `join_bytes`, for the encoder of SentencePiece.

    --bpe sentencepiece also prints the bytes of a model with byte fallback as text.
    """
    return decode(encoder, with_letters(x))
