"""Character clean-up before tokenisation, as Moses' Perl scripts do it.

Three scripts of Moses are rewritten here as tables: `normalize-punctuation.perl`,
`remove-non-printing-char.perl` and `replace-unicode-punctuation.perl`. The first and the last work on
bytes, so their `\\d`, `\\s` and `[a-z]` mean ASCII: every pattern below is compiled with re.ASCII.
"""

import re
import unicodedata
from functools import cache
from re import Pattern

from moa_fairseq.errors import UserError

# (required substring, pattern or None, replacement): without a pattern the substring itself is replaced. The
# search for a fixed string makes this fast, because most rules concern few lines.
Rule = tuple[str, Pattern | None, str]

# "current" is Moses' master branch; its state of December 2017 made Multi30k's published files.
MULTI30K_EDITION = "2017-12"
EDITIONS = ("current", MULTI30K_EDITION)

_ONE_SPACE = ("  ", " +", " ")
_BRACKETS_AND_COLONS = [
    ("\r", None, ""),
    ("(", None, " ("),
    (")", None, ") "),
    _ONE_SPACE,
    (") ", r"\) ([.!:?;,])", r")\1"),
    ("( ", None, "("),
    (" )", None, ")"),
    (" %", r"(\d) %", r"\1%"),
    (" :", None, ":"),
    (" ;", None, ";"),
]
_QUOTES_AND_DASHES = [
    ("`", None, "'"),
    ("''", None, ' " '),
    *((sign, None, '"') for sign in "„“”"),
    ("–", None, "-"),
    ("—", None, " - "),
    _ONE_SPACE,
    ("´", None, "'"),
    ("‘", "([a-zA-Z])‘([a-zA-Z])", r"\1'\2"),
    ("’", "([a-zA-Z])’([a-zA-Z])", r"\1'\2"),
]
_SINGLE_QUOTES = {
    "current": [("‘", None, "'"), ("‚", None, "'"), ("’", None, '"')],
    MULTI30K_EDITION: [(sign, None, '"') for sign in "‘‚’"],
}
_GUILLEMETS_AND_NO_BREAK_SPACES = [
    ("''", None, '"'),
    ("…", None, "..."),
    ("\u00a0«\u00a0", None, ' "'),
    ("«\u00a0", None, '"'),
    ("«", None, '"'),
    ("\u00a0»\u00a0", None, '" '),
    ("\u00a0»", None, '"'),
    ("»", None, '"'),
    ("\u00a0%", None, "%"),
    ("nº\u00a0", None, "nº "),
    ("\u00a0:", None, ":"),
    ("\u00a0ºC", None, " ºC"),
    ("\u00a0cm", None, " cm"),
    ("\u00a0", "\u00a0([?!;])", r"\1"),
    (",\u00a0", None, ", "),
    _ONE_SPACE,
]
# Moses has s/(\.+)"(\s*[^<])/"$1$2/, which scans a run of dots once for each of its dots. To avoid that, a
# run without a quote after it is also matched here, and replaced by itself.
_COMMA_AFTER_QUOTE = [(',"', None, '",'), ('."', r'(\.+)(?:(")(\s*[^<]))?', r"\2\1\3")]
_COMMA_BEFORE_QUOTE = [('"', r'"([,.]+)', r'\1"')]

# Wide and typographic signs → ASCII. "１" also becomes a quote in Moses: a slip in everyone's scores.
_UNICODE_PUNCTUATION: dict[str, str] = (
    dict.fromkeys("，、", ",")
    | dict.fromkeys("”“《》１」「", '"')
    | dict.fromkeys("∶：", ":")
    | dict(zip("？）！（；～’━〈〉【】％", "?)!(;~'-<>[]%"))
    | dict(zip("０２３４５６７８９", "023456789"))
    | {"…": "..."}
)


def normalize_punctuation(line: str, lang: str, edition: str = "current") -> str:
    """`normalize-punctuation.perl -l LANG`: one spelling for quotes, dashes, spaces and dots.

    Args:
        line: raw text without its line end.
        lang: the language's code of two letters. For "en" a full stop or comma moves into a closing quote,
            for "cs" and "cz" it stays, and for all others it moves out of the quote.
        edition: the edition of the script, one of EDITIONS.

    Raises:
        UserError: if the edition is unknown.
    """
    # The Perl script sees the line end, and one of its rules matches it: `."` at the end is rewritten.
    text = f"{line}\n"
    for needed, pattern, replacement in _normalization_rules(lang, edition):
        if needed in text:
            if pattern:
                text = pattern.sub(replacement, text)
            else:
                text = text.replace(needed, replacement)
    return text[:-1]


def remove_nonprinting(line: str) -> str:
    """`remove-non-printing-char.perl`: each character of Unicode category C becomes a space."""
    if line.isprintable():
        return line
    return "".join(" " if unicodedata.category(sign)[0] == "C" else sign for sign in line)


def replace_unicode_punctuation(line: str) -> str:
    """`replace-unicode-punctuation.perl`: full-width and typographic punctuation becomes ASCII."""
    if line.isascii():
        return line
    line = re.sub("[。．] *", ". ", line)
    return line.translate(_UNICODE_TRANSLATION)


def lowercase(line: str) -> str:
    """`lowercase.perl`: str.lower, except that every capital sigma becomes σ, also at the end of a word."""
    return line.replace("Σ", "σ").lower()


def straight_apostrophe(line: str) -> str:
    """’ becomes ': the WMT and IWSLT recipes change nothing else in test sets before tokenisation."""
    return line.replace("’", "'")


_UNICODE_TRANSLATION = str.maketrans(_UNICODE_PUNCTUATION)


@cache
def _normalization_rules(lang: str, edition: str) -> list[Rule]:
    if edition not in EDITIONS:
        raise UserError(
            f"Moses' scripts have no edition {edition!r}. Choose one of {', '.join(EDITIONS)}."
        )
    rows: list[tuple[str, str | None, str]] = []
    rows += _BRACKETS_AND_COLONS
    rows += _QUOTES_AND_DASHES
    rows += _SINGLE_QUOTES[edition]
    rows += _GUILLEMETS_AND_NO_BREAK_SPACES
    if lang == "en":
        rows += _COMMA_BEFORE_QUOTE
    elif lang not in ("cs", "cz"):
        rows += _COMMA_AFTER_QUOTE
    mark = "."
    if lang in ("de", "es", "cz", "cs", "fr"):
        mark = ","
    rows = [*rows, ("\u00a0", "(\\d)\u00a0(\\d)", rf"\g<1>{mark}\g<2>")]
    rules = []
    for needed, pattern, replacement in rows:
        compiled = re.compile(pattern, re.ASCII) if pattern else None
        rules.append((needed, compiled, replacement))
    return rules
