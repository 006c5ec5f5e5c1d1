"""The encoding of a file that is not UTF-8, by its bytes and language, and a command that converts it."""

from __future__ import annotations

import contextlib
import gzip
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from charset_normalizer import from_bytes

from moa_fairseq.experiments.records.json_files import selected

_SAMPLE_BYTES = 60_000  # enough to guess an encoding, and fast to read
_SHOWN = 20  # letters of the text that a message shows before and after a position
# Of ASCII text, UTF-16 has one NUL in two bytes, and UTF-32 has three in four. A file with a smaller share of
# NUL bytes than this is text with some stray ones.
_LEAST_NULS = 0.1
# Numbers of charset-normalizer's guesses that are tried. A guess is less certain than the usual encodings of
# the language, if the file's name tells the language; without a language there is little else.
_GUESSES = 1
_GUESSES_WITHOUT_LANGUAGE = 3
# The largest number of odd letters per byte above 127: a text with more of them is in another encoding or
# another language. Proper names and loan words have some.
_MOST_ODD = 0.3
_TIE = 0.02  # encodings whose numbers of odd letters per such byte differ by less are both shown
_MOST_ENCODINGS = 4  # more of them would make a message too long
# C1 control characters, except U+0085, the line end of some old computers. A text has them only if Windows'
# quotes and € were read as Latin-1.
CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")
_WIDE = "\u3000-\u303f\uff01-\uff65"  # Chinese and Japanese marks
_WEST = "CP1252 ISO-8859-15 CP850 MACINTOSH"
_EAST = "CP1250 ISO-8859-2 CP852"
_BALTIC = "CP1257 ISO-8859-13"
_CYRILLIC = "CP1251 KOI8-R ISO-8859-5 CP866 MAC-CYRILLIC"
# Language → its usual encodings, by iconv's names, and its non-ASCII letters, as the inside of a regular
# expression's [...].
_HABITS = {
    lang: (encodings, letters)
    for languages, encodings, letters in (
        ("de", _WEST, "äöüß"),
        ("en", _WEST, "éèêçñöüï"),
        ("fr", _WEST, "àâæçéèêëîïôœùûüÿ"),
        ("es gl eu ga", _WEST, "áéíóúüñ"),
        ("pt ca", _WEST, "àáâãçéèêíïóòôõúüñ·"),
        ("it", _WEST, "àèéìíîòóù"),
        ("nl", _WEST, "áéíóúèàëïöü"),
        ("sv da no nb nn fi", _WEST, "äåæöøéèêóòôü"),
        ("is", _WEST, "áðéíóúýþæö"),
        ("sq", _WEST, "çë"),
        ("pl", _EAST, "ąćęłńóśźż"),
        ("cs", _EAST, "áčďéěíňóřšťúůýž"),
        ("sk", _EAST, "áäčďéíĺľňóôŕšťúýž"),
        ("hu", _EAST, "áéíóöőúüű"),
        ("sl hr bs", _EAST, "čćđšž"),
        ("ro", f"{_EAST} ISO-8859-16", "ăâîşţșț"),
        ("et", _BALTIC, "äõöüšž"),
        ("lt", _BALTIC, "ąčęėįšųūž"),
        ("lv", _BALTIC, "āčēģīķļņšūž"),
        ("tr", "CP1254 ISO-8859-9 CP857", "çğıİöşüâîû"),
        ("el", "CP1253 ISO-8859-7 CP737", "ά-ώϊϋΐΰΆ-Ώ"),
        ("ru", _CYRILLIC, "а-яё"),
        ("be", _CYRILLIC, "а-яёіў"),
        ("bg", _CYRILLIC, "а-ъьюя"),
        ("uk", f"{_CYRILLIC} KOI8-U", "а-щьюяґєії"),
        ("sr mk", _CYRILLIC, "а-ијклљмнњо-џђћѓѕќ"),
        ("he", "CP1255 ISO-8859-8 CP862", "א-ת"),
        ("ar", "CP1256 ISO-8859-6", "ء-ي،؛؟"),
        ("fa", "CP1256", "ء-يپچژگ،؛؟"),
        ("th", "CP874", "ก-๛"),
        ("ja", "CP932 EUC-JP", f"\u3041-\u30ff\u4e00-\u9fff{_WIDE}"),
        ("ko", "CP949", f"가-힣{_WIDE}"),
        ("zh", "GB18030 BIG5-HKSCS", f"\u4e00-\u9fff{_WIDE}"),
    )
    for lang in languages.split()
}
_QUOTES = "„“”‚‘’«»‹›–—…¿¡\xa0\xad"  # marks that touch words
_INSIDE_WORDS = "’–—\xad"  # apostrophe, dashes, soft hyphen
_SIGNS = "€£§°½²³·•©®™†"  # other marks
# Beginnings of the names of encodings that charset-normalizer may guess and iconv does not have.
_NO_ICONV = ("cp1006", "cp720", "hz", "iso2022", "kz1048", "mac_", "ptcp154", "shift_jisx")
# charset-normalizer's name → iconv's, if they differ by more than case and "_".
_ICONV = {
    "euc_jis_2004": "EUC-JP",
    "shift_jis_2004": "SHIFT_JIS",
    "latin_1": "ISO-8859-1",
    "utf_16_le": "UTF-16LE",
    "utf_16_be": "UTF-16BE",
    "utf_32_le": "UTF-32LE",
    "utf_32_be": "UTF-32BE",
}


def pipe_command(path: Path, *programs: str) -> str:
    """A shell command that pipes a file, plain or .gz, through filters into a new file of the same kind.

    Args:
        path: the file.
        programs: the filters, quoted for a shell.
    """
    file = shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))
    if path.suffix == ".gz":
        return " | ".join([f"zcat {file}", *programs, "gzip > NEW.gz"])
    return " | ".join([f"{programs[0]} < {file}", *programs[1:]]) + " > NEW"


class _ForeignLines(NamedTuple):
    """What a file has besides UTF-8.

    Args:
        sample: the lines that are not UTF-8; in a file with a NUL byte, the beginning of the file.
        has_utf8: whether other lines are UTF-8 with non-ASCII letters.
        has_stray_nul: whether the file has NUL bytes, but too few for UTF-16 or UTF-32.
    """

    sample: bytes
    has_utf8: bool = False
    has_stray_nul: bool = False


def _foreign_lines(path: Path) -> _ForeignLines:
    sample = b""
    has_utf8 = False
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
        for line in iter(lambda: stream.readline(_SAMPLE_BYTES), b""):
            if b"\0" in line:  # UTF-16 and UTF-32 have other line ends, so a line means nothing
                stream.seek(0)
                beginning = stream.read(_SAMPLE_BYTES)
                share = beginning.count(b"\0") / len(beginning)
                return _ForeignLines(beginning, has_stray_nul=share < _LEAST_NULS)
            try:
                has_utf8 = has_utf8 or not line.decode("utf-8-sig").isascii()
            except UnicodeDecodeError:
                sample += line
            if len(sample) > _SAMPLE_BYTES:
                break
    return _ForeignLines(sample, has_utf8)


def encoding_remedy(path: Path) -> str:
    """How to convert a file that is not UTF-8, suggested by its bytes; for the end of an error."""
    foreign = _foreign_lines(path)
    if foreign.has_stray_nul:
        remedy = pipe_command(path, "tr -d '\\000'")
        return f"Remove it: {remedy}"
    if foreign.has_utf8:
        remedy = "correct or remove the lines that are not; iconv would spoil the others."
        return f"Other lines are UTF-8: {remedy}"
    suffix = path.name.removesuffix(".gz").rpartition(".")[2]
    language = re.split("[-_]", suffix.lower())[0]  # train.zh_CN.gz → zh
    texts = _plausible_texts(foreign.sample, language)
    if not texts:
        return "Its bytes do not show its encoding: find out how it was written, or fetch it again."
    position = _first_difference(list(texts.values()))
    ways = []
    for name, text in texts.items():
        command = pipe_command(path, f"iconv -f {name} -t utf-8")
        ways.append(f"{name}, which gives {_around(text, position)}: {command}")
    if len(ways) == 1:
        return f"If that text is right, its encoding is {ways[0]}"
    return (
        f"Its bytes fit several encodings; take the one with the right text. {'; or '.join(ways)}"
    )


def _first_difference(texts: Sequence[str]) -> int:
    """The first position at which texts differ, or one text's first non-ASCII letter; 0 without any."""
    for position, letters in enumerate(zip(*texts)):
        if len(set(letters)) > 1 or (len(texts) == 1 and not letters[0].isascii()):
            return position
    return 0


def _around(text: str, position: int) -> str:
    """The words around a position of the text that are on the same line, quoted."""
    start = max(text.rfind("\n", 0, position) + 1, position - _SHOWN)
    start_of_word = re.search(r"\S*\Z", text[max(0, start - _SHOWN) : start])
    rest_of_line = re.compile(rf"[^\r\n]{{0,{_SHOWN}}}\S{{0,{_SHOWN}}}").match(text, position)
    assert start_of_word and rest_of_line  # both also match nothing
    return repr((start_of_word[0] + text[start:position] + rest_of_line[0]).strip())


def _plausible_texts(foreign: bytes, language: str) -> dict[str, str]:
    """The encodings that the bytes may have, by iconv's names and the likeliest first → the text in each.

    Encodings that give the same text count once.
    """
    usual, letters = _HABITS.get(language, (_WEST, ""))
    guesses = _guessed_encodings(foreign)
    any_letter = rf"[\w{_WIDE}]"
    if not letters:
        texts = _decoded(foreign, [*guesses[:_GUESSES_WITHOUT_LANGUAGE], *usual.split()])
        return _with_fewest_odd_letters(texts, foreign, any_letter)
    texts = _decoded(foreign, [*usual.split(), *guesses[:_GUESSES]])
    likeliest = _with_fewest_odd_letters(texts, foreign, f"[{letters}]")
    # If no encoding gives letters of this language, the text is of another: any letters will do.
    return likeliest or _with_fewest_odd_letters(texts, foreign, any_letter)


def _has_wide_units(foreign: bytes) -> bool:
    """Whether the bytes are UTF-16 or UTF-32: every line of these has a NUL byte, and no other text has."""
    return b"\0" in foreign


def _guessed_encodings(foreign: bytes) -> list[str]:
    """charset-normalizer's guesses, the best first, by iconv's names."""
    names = []
    for match in from_bytes(foreign):
        name = match.encoding
        is_wide = name.startswith(("utf_16", "utf_32"))
        if not name.startswith(_NO_ICONV) and is_wide == _has_wide_units(foreign):
            names.append(_ICONV.get(name, name.upper().replace("_", "-")))
    return names


def _decoded(foreign: bytes, names: Iterable[str]) -> dict[str, str]:
    """The encodings in which the bytes are text → that text; the first of several that give the same."""
    texts: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(LookupError, UnicodeDecodeError):
            text = foreign.decode(name)
            is_wide = name.startswith("UTF")
            is_text = not CONTROLS.search(text) and is_wide == _has_wide_units(foreign)
            if is_text and text not in texts.values():
                texts[name] = text
    return texts


def _with_fewest_odd_letters(texts: dict[str, str], foreign: bytes, letters: str) -> dict[str, str]:
    """The texts with the fewest odd letters, the fewest first; {} if all texts have too many.

    Args:
        texts: encoding → the text.
        foreign: the bytes of which they were decoded.
        letters: a regular expression of a letter of the language.
    """
    fits = re.compile(letters, re.IGNORECASE)
    odd = {name: _odd_letters(text, fits) for name, text in texts.items()}
    fewest = min(odd.values(), default=0)
    high_bytes = sum(byte > 127 for byte in foreign)
    if fewest > high_bytes * _MOST_ODD and not _has_wide_units(foreign):
        return {}
    most = fewest + high_bytes * _TIE
    names = [name for name in sorted(odd, key=odd.__getitem__) if odd[name] <= most]
    return selected(texts, names[:_MOST_ENCODINGS])


def _odd_letters(text: str, fits: re.Pattern[str]) -> int:
    """The number of non-ASCII letters that are not of the language, or that stand where they cannot."""
    count = 0
    for match in re.finditer(r"[^\x00-\x7f]", text):
        letter = match[0]
        before = text[match.start() - 1 : match.start()]
        after = text[match.end() : match.end() + 1]
        if fits.match(letter):
            odd = letter.isupper() and before.islower()  # aÉb: a capital inside a word
        elif letter in _QUOTES:
            is_inside = before.isalpha() and after.isalpha()  # a«b, but not it’s
            odd = is_inside and letter not in _INSIDE_WORDS
        else:
            odd = letter not in _SIGNS or after.isalpha()  # another alphabet's letter, or €a
        count += odd
    return count
