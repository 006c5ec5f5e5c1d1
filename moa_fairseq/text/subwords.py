"""Subwords as text: a model's merges, pieces and bytes undone."""

import re

_NEXT_LINE = "\x85"  # white space to fairseq, a letter to SentencePiece
_BYTES = re.compile(r"(?<!\S)<0x[0-9A-F]{2}>(?: <0x[0-9A-F]{2}>)*(?!\S)")


def plain(line: str) -> str:
    """A line in which all white space is known to SentencePiece."""
    return line.replace(_NEXT_LINE, " ")


def with_letters(symbols: str) -> str:
    """Pieces between spaces, each run of bytes (`<0xE3> <0x81> <0x82>`) as letters, by UTF-8."""

    def letters(run: re.Match) -> str:
        return bytes(int(byte[3:5], 16) for byte in run[0].split()).decode(
            "utf-8", errors="replace"
        )

    return _BYTES.sub(letters, symbols)


def join_subwords(line: str, kind: str) -> str:
    """Undo subwords, as fairseq's --remove-bpe does with the plugin's patch for bytes.

    Args:
        line: symbols between spaces.
        kind: "subword_nmt" removes `@@ `, "sentencepiece" joins pieces at ▁ and bytes to letters, "none"
            changes nothing.
    """
    if kind == "sentencepiece":
        return with_letters(line).replace(" ", "").replace("\u2581", " ").strip()
    if kind == "subword_nmt":
        return (line + " ").replace("@@ ", "").rstrip()
    return line
