"""Bytes of SentencePiece's byte fallback, wherever fairseq joins pieces."""

import argparse

import pytest
import sentencepiece
from fairseq.data import Dictionary, data_utils
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE

LINES = ["猫 は 水 を 見ます", "die Katze sieht Wasser"] * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("pieces") / "some.model"
    with open(path, "wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_writer=stream,
            vocab_size=300,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    return str(path)


def test_bytes_become_letters(model):
    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    for text in ("鬱 die Katze", "ﷺ鬱", "a鬱 Ж", "見ます"):
        symbols = " ".join(processor.id_to_piece(processor.encode(text)))
        assert data_utils.post_process(symbols, "sentencepiece") == processor.decode(
            processor.encode(text)
        )
    dictionary = Dictionary()
    ids = dictionary.encode_line("\u2581a <0xE9> <0xAC> <0xB1> \u2581b")
    assert dictionary.string(ids, "sentencepiece") == "a鬱 b"


def test_the_encoder_of_pieces_undoes_bytes(model):
    encoder = SentencepieceBPE(
        argparse.Namespace(
            sentencepiece_model=model,
            sentencepiece_enable_sampling=False,
            sentencepiece_alpha=None,
        )
    )
    assert (
        "<0xE9>" in encoder.encode("鬱 Katze")
        and encoder.decode(encoder.encode("鬱 Katze")) == "鬱 Katze"
    )


def test_text_that_looks_like_a_byte_stays():
    assert data_utils.post_process("\u2581 < 0x E9 >", "sentencepiece") == "<0xE9>"
    assert data_utils.post_process("x<0xE9> <0x41>@@ b", "subword_nmt") == "x<0xE9> <0x41>b"


def test_bytes_that_are_no_letter_are_shown_as_such():
    assert data_utils.post_process("\u2581a <0xE9> \u2581b", "sentencepiece") == "a\ufffd b"
