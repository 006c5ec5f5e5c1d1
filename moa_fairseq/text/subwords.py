"""Subwords back to text: undoing merges, pieces and bytes."""

import re

_NEXT_LINE = "\x85"  # white space for fairseq, a letter for SentencePiece
_BYTES = re.compile(r"(?<!\S)<0x[0-9A-F]{2}>(?: <0x[0-9A-F]{2}>)*(?!\S)")


def plain(line: str) -> str:
    """The line, in which all white space is white space for SentencePiece, too."""
    return line.replace(_NEXT_LINE, " ")


def with_letters(symbols: str) -> str:
    """Replace each run of bytes (`<0xE3> <0x81> <0x82>`) among pieces by its letters in UTF-8."""

    def letters(run: re.Match) -> str:
        return bytes(int(byte[3:5], 16) for byte in run[0].split()).decode(
            "utf-8", errors="replace"
        )

    return _BYTES.sub(letters, symbols)


def join_subwords(line: str, kind: str) -> str:
    """Join subwords to text, as fairseq's --remove-bpe does with the plugin's patch for bytes.

    Args:
        line: symbols separated by spaces.
        kind: "subword_nmt" removes `@@ `; "sentencepiece" joins pieces at ▁ and turns bytes into letters;
            "none" changes nothing.
    """
    if kind == "sentencepiece":
        return with_letters(line).replace(" ", "").replace("\u2581", " ").strip()
    if kind == "subword_nmt":
        return (line + " ").replace("@@ ", "").rstrip()
    return line
