"""Moses' `tokenizer.perl`, with its rules for single languages.

The lists of abbreviations come from sacremoses. The rules are written here, because the character classes of
sacremoses date from an old Unicode (it cuts Chinese words into characters, and Perl does not), and sacremoses
treats the last full stop of a line as Moses did until 2017.
"""

import re
from functools import cache

import regex
from sacremoses import MosesDetokenizer
from sacremoses.corpus import NonbreakingPrefixes

from moa_fairseq.errors import UserError
from moa_fairseq.text.normalize import EDITIONS, MULTI30K_EDITION

_ALPHA = r"\p{Alphabetic}"
_ALNUM = r"\p{Alphabetic}\p{Nd}"
_NUMBER = r"\p{N}"
_CONTROLS = dict.fromkeys([*range(0x09), *range(0x0E, 0x20)])
# Signs inside words of a language, as in USA:n and col·legi.
_WITHIN_WORDS = {"fi": ":", "sv": ":", "ca": "·"}
# Signs that also end a word, unless a small letter follows. (Moses has this rule for the middle dot, too, but
# there it never matches: Perl reads that line of the script as Latin-1.)
_BEFORE_SMALL_LETTERS = {
    language: regex.compile(rf"{sign}(?=$|[^\p{{Ll}}])")
    for language, sign in (("fi", ":"), ("sv", ":"), ("tdt", "'"))
}
_HYPHEN = regex.compile(rf"([{_ALNUM}])-(?=[{_ALNUM}])")
_DOTS = re.compile(r"\.\.+(?=(.)?)")
_COMMAS = [
    (regex.compile(rf"([^{_NUMBER}]),"), r"\1 , "),
    (regex.compile(rf",([^{_NUMBER}])"), r" , \1"),
]
_LAST_COMMA = regex.compile(rf"({_NUMBER}),$")
_LAST_FULL_STOP_AND_QUOTE = re.compile(r"\.' ?$")
_HAS_ALPHA = regex.compile(_ALPHA)
_STARTS_LOWER = regex.compile(r"\p{Lowercase}")
_STARTS_WITH_DIGIT = re.compile(r"[0-9]")
_SPACES = re.compile(r" +")
# Replaced in this order: & must be first, since it occurs in the other entities.
_ESCAPES = (
    *(("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&apos;"), ('"', "&quot;")),
    *(("|", "&#124;"), ("[", "&#91;"), ("]", "&#93;")),
)
# Represents one dot of a run: control characters are removed before, so that no text contains it.
_DOT = "\x00"


def _apostrophe_rules(
    between_letters: str, after_other: str = _ALPHA
) -> list[tuple[regex.Pattern, str]]:
    """Replacement of an apostrophe by its neighbours: other-other, other-letter, letter-other, letters."""
    non_letter = rf"([^{_ALPHA}])"
    letter = rf"([{_ALPHA}])"
    return [
        (regex.compile(f"{non_letter}'{non_letter}"), r"\1 ' \2"),
        (regex.compile(f"([^{after_other}])'{letter}"), r"\1 ' \2"),
        (regex.compile(f"{letter}'{non_letter}"), r"\1 ' \2"),
        *([(regex.compile(f"{letter}'{letter}"), between_letters)] if between_letters else []),
    ]


_APOSTROPHES = {
    "en": [
        *_apostrophe_rules(r"\1 '\2", _ALPHA + _NUMBER),
        (regex.compile(rf"({_NUMBER})'s"), r"\1 's"),
    ],
    **dict.fromkeys(("fr", "it", "ga", "ca"), _apostrophe_rules(r"\1' \2")),
    **dict.fromkeys(("so", "tdt"), _apostrophe_rules("")),  # between letters it is a glottal stop
}
_ANY_APOSTROPHE = [(regex.compile("'"), " ' ")]


def tokenize(
    line: str,
    lang: str,
    aggressive_hyphens: bool = False,
    escape: bool = True,
    edition: str = "current",
) -> str:
    """`tokenizer.perl -l LANG [-a] [-no-escape]`: tokens separated by spaces.

    Spaces are single, except in a line that ends in a full stop and a quote: there Moses may leave two before
    the full stop, and leaves one at the end.

    Args:
        line: text without its line end; a blank line is returned unchanged, or empty if it had control
            characters.
        lang: the language's code, such as "de"; for a language without a list of abbreviations the English
            list is used.
        aggressive_hyphens: write a hyphen between letters as ` @-@ `.
        escape: write & | < > ' " [ ] as entities.
        edition: "2017-12" leaves a last full stop at an abbreviation or number unsplit, as the Moses that
            made Multi30k's published files did.

    Raises:
        UserError: if the edition is unknown.
    """
    if edition not in EDITIONS:
        raise UserError(
            f"Moses' tokenizer has no edition {edition!r}. Choose one of {', '.join(EDITIONS)}."
        )
    text = line
    if not line.isprintable():
        text = line.translate(_CONTROLS)
    if not text.strip():
        return line if text == line else ""
    text = " ".join(text.split())
    text = _special(lang).sub(r" \1 ", text)
    if lang in _BEFORE_SMALL_LETTERS:
        text = _BEFORE_SMALL_LETTERS[lang].sub(lambda sign: f" {sign[0]} ", text)
    if aggressive_hyphens:
        text = _HYPHEN.sub(r"\1 @-@ ", text)
    if ".." in text:
        # A run of dots becomes a word of signs to which the rules for full stops do not apply.
        text = _DOTS.sub(lambda run: f" {_DOT * len(run[0])}{' ' if run[1] else ''}", text)
    if "," in text:
        for pattern, replacement in _COMMAS:
            text = pattern.sub(replacement, text)
        text = _LAST_COMMA.sub(r"\1 ,", text)
    if "'" in text:
        for pattern, replacement in _APOSTROPHES.get(lang, _ANY_APOSTROPHE):
            text = pattern.sub(replacement, text)
    text = _SPACES.sub(" ", " ".join(_split_full_stops(text, lang, edition))).strip(" ")
    text = _LAST_FULL_STOP_AND_QUOTE.sub(" . ' ", text)
    text = text.replace(_DOT, ".")
    for sign, entity in _ESCAPES if escape else ():
        text = text.replace(sign, entity)
    return text


def _split_full_stops(text: str, lang: str, edition: str) -> list[str]:
    """The words of `text` with a space before each full stop that ends a sentence."""
    always, before_digit = nonbreaking_prefixes(lang)
    # Empty words (from two spaces) stay, because Moses looks at the next word even if it is empty.
    words = text.rstrip(" ").split(" ")
    last = len(words) - 1
    for i, word in enumerate(words):
        if len(word) < 2 or word[-1] != ".":
            continue
        stem = word[:-1]
        following = words[i + 1] if i < last else ""
        keep = (
            ("." in stem and _HAS_ALPHA.search(stem))
            or stem in always
            or _STARTS_LOWER.match(following)
            or (stem in before_digit and _STARTS_WITH_DIGIT.match(following))
        )
        if not keep or (i == last and edition != MULTI30K_EDITION):
            words[i] = stem + " ."
    return words


@cache
def _special(lang: str) -> regex.Pattern:
    """The signs that are always separate tokens in a language."""
    return regex.compile(rf"([^{_ALNUM}\s.'`,\-{_WITHIN_WORDS.get(lang, '')}])")


def has_prefixes(lang: str) -> bool:
    """True if Moses has a list of abbreviations for the language."""
    return lang in NonbreakingPrefixes().available_langs.values()


@cache
def nonbreaking_prefixes(lang: str) -> tuple[frozenset, frozenset]:
    """The abbreviations of a language, or of English if the language has no list.

    Returns:
        always: abbreviations whose full stop never ends a sentence.
        before_digit: abbreviations whose full stop does not end a sentence if a digit follows.
    """
    kinds: dict[bool, set] = {False: set(), True: set()}
    for entry in NonbreakingPrefixes().words(lang if has_prefixes(lang) else "en"):
        word, _, marker = entry.strip().partition(" ")
        kinds["#NUMERIC_ONLY#" in marker].add(word)
    return frozenset(kinds[False]), frozenset(kinds[True])


_detokenizer = cache(MosesDetokenizer)


def detokenize(line: str, lang: str) -> str:
    """`detokenizer.perl` as in sacremoses: the tokens of a line, separated by spaces, become running text.

    It also undoes ` @-@ ` and the entities (&quot; &apos; &amp; &#124; &lt; &gt; &#91; &#93;).
    """
    return _detokenizer(lang).detokenize(line.split())
