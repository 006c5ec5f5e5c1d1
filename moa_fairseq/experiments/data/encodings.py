"""The encoding of a file that is not UTF-8, by its bytes and language, and a command that converts it."""

from __future__ import annotations

import contextlib
import gzip
import re
import shlex
from pathlib import Path

from charset_normalizer import from_bytes

from moa_fairseq.experiments.records.json_files import selected

_SAMPLE = 60_000  # bytes for guessing an encoding
_SHOWN = 20  # letters before and after the position that a sample shows
# Characters that no text has, except the line end of some old computers: Windows' quotes and € read as
# Latin-1.
CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")
_WIDE = "\u3000-\u303f\uff01-\uff65"  # marks of Chinese and Japanese
_WEST = "CP1252 ISO-8859-15 CP850 MACINTOSH"
_EAST = "CP1250 ISO-8859-2 CP852"
_BALTIC = "CP1257 ISO-8859-13"
_CYRILLIC = "CP1251 KOI8-R ISO-8859-5 CP866 MAC-CYRILLIC"
# Language → its usual encodings, by iconv's names, and its non-ASCII letters, for a regular expression.
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
_SIGNS = "€£§°½²³·•©®™†"  # other marks
# Encodings that charset-normalizer may guess and iconv does not have.
_NO_ICONV = ("cp1006", "cp720", "hz", "iso2022", "kz1048", "mac_", "ptcp154", "shift_jisx")
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


def encoding_remedy(path: Path) -> str:
    """How to convert a file that is not UTF-8, suggested by its bytes; for the end of an error."""
    foreign = b""
    mixed = False
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
        for line in iter(lambda: stream.readline(_SAMPLE), b""):
            if b"\0" in line:  # UTF-16 or UTF-32, which have other line ends
                stream.seek(0)
                foreign = stream.read(_SAMPLE)
                mixed = False
                if foreign.count(b"\0") < len(foreign) / 10:
                    remedy = pipe_command(path, "tr -d '\\000'")
                    return f"Remove it: {remedy}"
                break
            try:
                mixed = mixed or not line.decode("utf-8-sig").isascii()
            except UnicodeDecodeError:
                foreign += line
            if len(foreign) > _SAMPLE:
                break
    if mixed:
        remedy = "correct or remove the lines that are not; iconv would spoil the others."
        return f"Other lines are UTF-8: {remedy}"
    texts = _plausible(
        foreign, re.split("[-_]", path.name.removesuffix(".gz").rpartition(".")[2].lower())[0]
    )
    if not texts:
        return "Its bytes do not show its encoding: find out how it was written, or fetch it again."
    # The sample shows the first non-ASCII letter, or the first position at which the texts differ.
    first, *other_texts = texts.values()
    place = 0
    for number, letters in enumerate(zip(first, *other_texts)):
        if len(set(letters)) > 1 or not (other_texts or first[number].isascii()):
            place = number
            break
    ways = []
    for name, text in texts.items():
        command = pipe_command(path, f"iconv -f {name} -t utf-8")
        ways.append(f"{name}, which gives {_around(text, place)}: {command}")
    if len(ways) == 1:
        return f"If that text is right, its encoding is {ways[0]}"
    return (
        f"Its bytes fit several encodings; take the one with the right text. {'; or '.join(ways)}"
    )


def _around(text: str, place: int) -> str:
    """The words of a line around a position in the text."""
    start = max(text.rfind("\n", 0, place) + 1, place - _SHOWN)
    before = re.search(r"\S*\Z", text[max(0, start - _SHOWN) : start])
    after = re.compile(r"[^\r\n]{0,20}[^\s]{0,20}").match(text, place)
    return repr(
        ((before[0] if before else "") + text[start:place] + (after[0] if after else "")).strip()
    )


def _plausible(foreign: bytes, lang: str) -> dict[str, str]:
    """iconv's names of the encodings that the bytes may have, the likeliest first → the text in each.

    Encodings that give the same text count once. lang: the language, with its usual encodings and letters.
    """
    usual, letters = _HABITS.get(lang, (_WEST, ""))
    wide = b"\0" in foreign  # every line of UTF-16 and UTF-32 has one
    likely = []
    for match in from_bytes(foreign):
        name = match.encoding
        is_wide = name.startswith(("utf_16", "utf_32"))
        if not name.startswith(_NO_ICONV) and is_wide == wide:
            likely.append(_ICONV.get(name, name.upper().replace("_", "-")))
    names = [*usual.split(), *likely[:1]] if letters else [*likely[:3], *usual.split()]
    texts: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(LookupError, UnicodeDecodeError):
            text = foreign.decode(name)
            is_wide = name.startswith("UTF")
            if text not in texts.values() and not CONTROLS.search(text) and is_wide == wide:
                texts[name] = text
    high_bytes = sum(byte > 127 for byte in foreign)
    for pattern in ([f"[{letters}]"] if letters else []) + [rf"[\w{_WIDE}]"]:
        fits = re.compile(pattern, re.IGNORECASE)
        odd = {name: _odd(text, fits) for name, text in texts.items()}
        fewest = min(odd.values(), default=0)
        if texts and (fewest <= high_bytes * 0.3 or wide):
            most = fewest + high_bytes * 0.02
            good = [name for name in sorted(odd, key=odd.__getitem__) if odd[name] <= most]
            return selected(texts, good[:4])
    return {}


def _odd(text: str, fits: re.Pattern[str]) -> int:
    """Number of non-ASCII letters that are not of the language, or in impossible positions."""
    count = 0
    for match in re.finditer(r"[^\x00-\x7f]", text):
        letter = match[0]
        place = match.start()
        before = text[place - 1 : place]
        after = text[place + 1 : place + 2]
        if fits.match(letter):
            odd = letter.isupper() and before.islower()
        elif letter in _QUOTES:
            odd = before.isalpha() and after.isalpha() and letter not in "’–—\xad"
        else:
            odd = letter not in _SIGNS or after.isalpha()
        count += odd
    return count
