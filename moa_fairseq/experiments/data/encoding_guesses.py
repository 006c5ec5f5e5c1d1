"""Guesses the encoding of text: which encodings make bytes a text of a language."""

import contextlib
import re
from collections.abc import Sequence

from charset_normalizer import from_bytes

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
_ANY_LETTER = rf"[\w{_WIDE}]"
# Languages → their usual encodings, by iconv's names, and their non-ASCII letters, as the inside of a regular
# expression's [...].
_LANGUAGES = (
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


def plausible_texts(sample: bytes, language: str) -> dict[str, str]:
    """The texts that bytes may be.

    Args:
        sample: bytes that are not UTF-8.
        language: the code of the language, such as "de"; "" or any other word if it is unknown.

    Returns:
        The encoding, by iconv's name and the likeliest first → the text. Encodings that give the same text
        count once; {} if no encoding gives a text.
    """
    encodings, letters = _encodings_and_letters(language)
    guesses = _guessed_encodings(sample)
    if not letters:
        texts = _decoded(sample, guesses[:_GUESSES_WITHOUT_LANGUAGE] + encodings)
        return _with_fewest_odd_letters(texts, sample, _ANY_LETTER)
    texts = _decoded(sample, encodings + guesses[:_GUESSES])
    likeliest = _with_fewest_odd_letters(texts, sample, f"[{letters}]")
    # If no encoding gives letters of this language, the text is of another: any letters will do
    return likeliest or _with_fewest_odd_letters(texts, sample, _ANY_LETTER)


def _encodings_and_letters(language: str) -> tuple[list[str], str]:
    """The usual encodings of a language and its non-ASCII letters; "" for an unknown language."""
    for languages, encodings, letters in _LANGUAGES:
        if language in languages.split():
            return encodings.split(), letters
    return _WEST.split(), ""


def _guessed_encodings(sample: bytes) -> list[str]:
    """charset-normalizer's guesses, the best first, by iconv's names."""
    names = []
    for match in from_bytes(sample):
        guess = match.encoding
        name = _ICONV.get(guess, guess.upper().replace("_", "-"))
        if not guess.startswith(_NO_ICONV) and _has_units_of(name, sample):
            names.append(name)
    return names


def _has_units_of(name: str, sample: bytes) -> bool:
    """Whether both the encoding and the bytes are UTF-16 or UTF-32, or neither.

    Every line of UTF-16 and UTF-32 has a NUL byte, and no other text has.
    """
    return name.startswith("UTF") == (b"\0" in sample)


def _decoded(sample: bytes, names: Sequence[str]) -> dict[str, str]:
    """The encodings in which the bytes are text → that text; the first of several that give the same."""
    texts: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(LookupError, UnicodeDecodeError):
            text = sample.decode(name)
            is_text = _has_units_of(name, sample) and not CONTROLS.search(text)
            if is_text and text not in texts.values():
                texts[name] = text
    return texts


def _with_fewest_odd_letters(texts: dict[str, str], sample: bytes, letters: str) -> dict[str, str]:
    """The texts with the fewest odd letters, the fewest first; {} if all texts have too many.

    Args:
        texts: encoding → the text.
        sample: the bytes of which they were decoded.
        letters: a regular expression of a letter of the language.
    """
    letter = re.compile(letters, re.IGNORECASE)
    counts = {name: _count_odd_letters(text, letter) for name, text in texts.items()}
    fewest = min(counts.values(), default=0)
    high_bytes = sum(byte > 127 for byte in sample)
    if fewest > high_bytes * _MOST_ODD and b"\0" not in sample:
        return {}
    most = fewest + high_bytes * _TIE
    names = [name for name in sorted(counts, key=counts.__getitem__) if counts[name] <= most]
    return {name: texts[name] for name in names[:_MOST_ENCODINGS]}


def _count_odd_letters(text: str, letter: re.Pattern[str]) -> int:
    """The number of non-ASCII letters that are not of the language, or that stand where they cannot."""
    count = 0
    for match in re.finditer(r"[^\x00-\x7f]", text):
        char = match[0]
        before = text[match.start() - 1 : match.start()]
        after = text[match.end() : match.end() + 1]
        if letter.match(char):
            count += char.isupper() and before.islower()  # aÉb: a capital inside a word
        elif char in _QUOTES:
            is_inside = before.isalpha() and after.isalpha()  # a«b, but not it’s
            count += is_inside and char not in _INSIDE_WORDS
        elif char in _SIGNS:
            count += after.isalpha()  # €a
        else:  # another alphabet's letter
            count += 1
    return count
