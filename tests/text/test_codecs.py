"""Symbols and back: whatever a line holds, its letters are read again as they were."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from subword_nmt.apply_bpe import BPE

from moa_fairseq.experiments.data import pieces
from moa_fairseq.text import tokenizer
from moa_fairseq.text.codecs import ByteCodec, MergeCodec, PieceCodec, TranslationCodec
from moa_fairseq.text.normalize import EDITIONS
from moa_fairseq.text.steps import detokenize, tokenize, words_of

# What segmentations have a sign for, and what tokenisers have rules for
ODD = "he|the |@@|@@ |@-@|\u2581|<0xE3>|<unk>|</w>|&amp;|&lt;|1,|a.|..|.'|n't|-|:|\u3000|\x85|\xa0|\r|\x00"
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\n")
LINES = st.lists(CHARACTERS | st.sampled_from(ODD.split("|"))).map("".join)
MERGES = MergeCodec(BPE(io.StringIO("#version: 0.2\nt h\nth e</w>\nh e\n")))
LANGUAGES = ["en", "de", "fr", "fi", "tdt", "zh"]


def letters(line):
    return "".join(line.translate(tokenizer._CONTROLS).split())


def as_symbols(line):
    """As a dictionary takes them apart, at white space of any kind."""
    return " ".join(line.split())


@given(LINES, st.sampled_from(LANGUAGES), st.booleans(), st.sampled_from(EDITIONS))
def test_tokens_are_the_line_and_only_signs_become_entities(line, lang, hyphens, edition):
    tokens = tokenize(line, lang, hyphens, edition=edition)
    assert letters(detokenize(tokens, lang)) == letters(line)
    for sign, entity in reversed(tokenizer._ESCAPES):
        tokens = tokens.replace(entity, sign)
    assert tokens == tokenize(line, lang, hyphens, escape=False, edition=edition)


@given(LINES)
def test_bytes_and_merges_give_the_line_back(line):
    assert ByteCodec().decode(ByteCodec().encode(line)) == line
    words = words_of(line, ())
    assert MERGES.decode(as_symbols(MERGES.encode(words))) == " ".join(words.split())
    codec = TranslationCodec([("tokenize", {"lang": "de"})], (MERGES, MERGES), "de")
    assert letters(codec.decode(codec.encode(line))) == letters(line)


def test_the_text_of_merges_is_that_of_their_file():
    text = "#version: 0.2\nt h\nth e</w>\nh e\na b\n"
    merges = MergeCodec(BPE(io.StringIO(text)))
    assert merges.text() == text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_pieces_give_the_words_back(tmp_path, kind):
    path = tmp_path / "model"
    text = ["then he lets the hen in", "the end"]
    pieces.learn(text, "text", 300, path, **pieces.translation_settings(kind, True))
    codec = PieceCodec(pieces.processor(str(path)))

    @settings(max_examples=settings.default.max_examples // 2)
    @given(LINES)
    def check(line):
        text = codec.decode(as_symbols(codec.encode(line)))
        assert text.split() == line.replace("\u2581", " ").split()

    check()
