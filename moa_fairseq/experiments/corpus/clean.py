"""Which message pairs are training pairs: plain sentences without markup, in English and German."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator

# Limits of a pair: shorter messages are labels, longer ones are texts of several sentences, and two sides
# with a larger ratio of lengths are rarely translations.
MIN_ENGLISH_WORDS = 3
MAX_WORDS = 80
MAX_CHARACTER_RATIO = 2.5

Pair = tuple[str, str]

# Anything here means code, markup or a placeholder; such a message is dropped completely,
# because a sentence with its placeholder cut out is no longer a sentence.
_NOT_PLAIN = re.compile(
    r"""
      %\w|%[^\s\w.,;:!?)]|%\s*\(      # %s, %1, %(name)s; "20 %" and "5%." are prose: see _PERCENT
    | [{}<>\[\]\\|`~^=@\#*$]            # {name}, <b>, [link], \path, a|b, ``code``, e-mail, *bold*, $x
    | &\w+;|&\#                         # entities
    | ''|[→←↑↓█·″′]                    # wiki quotes, menu arrows, bars
    | ://|\bwww\.                       # addresses
    | \w\(\)|::|->|--|\+\+              # calls, scopes, arrows, command-line options
    | (?<!\w)[/~]\w+/|\w/\w+/           # file paths
    | \w\.(?:py|html?|xml|json|ya?ml|css|js|txt|csv|ini|cfg|po|mo|sh|org|com|net|de)\b
    | (?:^|\s)[•–-]\s.*\s[•–-]\s        # lists run together
    | \.\.\.\s*\S+.*\.\.\.              # ellipses with gaps for run-time text
    """,
    re.VERBOSE,
)
_PERCENT = re.compile(r"(?<=\d)\s?%(?=$|[\s.,;:!?)])")
# Control and format characters, symbols and emoji, and the marks that modify them.
_UNWANTED = frozenset(("Cc", "Cf", "Co", "Cn", "Cs", "So", "Sk", "Mn", "Me"))
_MOJIBAKE = re.compile("Ã[\x80-\xbf„œŸ¤¶¼]|Â[\xa0-\xbf]|â€|\ufffd|[\x80-\x9f]")
_IDENTIFIER = re.compile(r"\w_\w+_\w|\b[a-z]+[a-z0-9]*[A-Z]\w*|\b[A-Z]{2,}_[A-Z]+")
_INNER_UNDERSCORE = re.compile(r"\w+_\w+")
_TOKEN = re.compile(r"\w+(?:['’-]\w+)*", re.UNICODE)
_DIGITS = re.compile(r"\d+(?:[.,:]\d+)*")
_TAG = re.compile(
    r"</?(a|abbr|b|big|br|div|em|h[1-6]|i|li|p|small|span|strong|u|ul)\b[^<>]*>", re.IGNORECASE
)
# Tags that end a paragraph, and a bold line that is the heading of what follows.
_BREAK = re.compile(
    r"<(?:br|/?p|/?div|/?li|/?h[1-6])\b[^<>]*>|</(?:b|strong)>[ ]*\n", re.IGNORECASE
)
# "Fula (Latin) (Guinea)": an entry of a list of languages or places.
_QUALIFIED_NAME = re.compile(r"\w+(?: \([A-Z][^()]*\))+")
_SENTENCE_END = re.compile(r"(?<=[a-zäöüß)][.!?])\s+(?=[A-ZÄÖÜ])")
_UMLAUT = re.compile("[äöüßÄÖÜ]")
_TAIL = re.compile(r"\s?(?:\.\.\.|…|:)$")
_LIST_LINE = re.compile(r"^\s*(?:[-*•+#]|\d+[.)])\s")


# Frequent words that the other language lacks ("in", "was", "die", "an", "so", "war" are in both).
ENGLISH_WORDS = (
    "the of and to a is are for with this that you your be not no from by it or if can has have will on as "
    "please all which when what please do does must only more should been there their could its any at "
    "new user user's set add edit delete remove show select use used using cannot enter"
)
GERMAN_WORDS = (
    "der das den dem des ein eine einen einem einer eines und oder nicht ist sind wird werden wurde wurden "
    "für mit von zu zum zur auf aus bei bitte sie ihr ihre ihren ihrer kann können keine kein keinen als "
    "auch nach über vom im wenn dass diese dieser dieses diesen dies hat haben nur noch mehr muss müssen "
    "sich es durch um bis vor wie alle soll sollte beim ob du dein deine ich wir unter zwischen neue neuen"
)
_FREQUENT = [frozenset(words.split()) for words in (ENGLISH_WORDS, GERMAN_WORDS)]


def clean_message(english: str, german: str) -> Iterator[Pair]:
    """Yield the clean sentence pairs (none, one or several) of one catalogue message.

    Paragraphs are split if both sides have equally many; hard line breaks inside a paragraph become
    spaces. Every yielded pair has passed `is_translation`.
    """
    english, german = _strip_tags(english, german)
    sources = _paragraphs(english)
    targets = _paragraphs(german)
    if len(sources) != len(targets):
        return
    for source, target in zip(sources, targets):
        pair = _strip_ui_markup(_tidy(source), _tidy(target))
        if is_translation(*pair):
            yield pair
        else:
            yield from _sentence_pairs(*pair)


def _sentence_pairs(english: str, german: str) -> Iterator[Pair]:
    """The translations among the sentences of a paragraph: a placeholder spoils only its own sentence."""
    sources = _SENTENCE_END.split(english)
    targets = _SENTENCE_END.split(german)
    if len(sources) != len(targets) or len(sources) == 1:
        return
    for pair in zip(sources, targets):
        if is_translation(*pair):
            yield pair


def is_translation(english: str, german: str) -> bool:
    """Whether two tidied lines look like a human English-German sentence pair worth training on."""
    if not (_is_plain(english) and _is_plain(german)) or english.casefold() == german.casefold():
        return False
    if _QUALIFIED_NAME.fullmatch(english):
        return False
    if len(_TOKEN.findall(english)) < MIN_ENGLISH_WORDS or len(english.split()) < MIN_ENGLISH_WORDS:
        return False
    # Short labels vary more: six characters of slack keep "Log out of it" / "Abmelden".
    short, long = sorted((len(english) + 6, len(german) + 6))
    most_words = max(len(english.split()), len(german.split()))
    if most_words > MAX_WORDS or long > MAX_CHARACTER_RATIO * short:
        return False
    # The same numbers on both sides, whatever their separators (1,000.5 / 1.000,5).
    if _numbers(english) != _numbers(german):
        return False
    if _germanness(english) > 0 or _germanness(german) < 0:
        return False
    # Mostly the same words in both: untranslated, or a list of names.
    words = _words(english)
    german_words = _words(german)
    shared = (Counter(words) & Counter(german_words)).total()
    return shared <= 0.5 * max(len(words), len(german_words))


def _words(text: str) -> list[str]:
    # The dot of "İ" is a separate character after lower()
    return [word.lower() for word in _TOKEN.findall(text)]


def _numbers(text: str) -> list[str]:
    return sorted(re.sub(r"\D", "", number) for number in _DIGITS.findall(text))


def _germanness(text: str) -> int:
    """The number of German function words and of words with ä, ö, ü or ß, minus English function words."""
    score = len(list(filter(_UMLAUT.search, text.split())))
    for word in _words(text):
        score += (word in _FREQUENT[1]) - (word in _FREQUENT[0])
    return score


def _strip_tags(english: str, german: str) -> Pair:
    """Remove inline markup if both sides have the same tags; other markup stays, so the pair is dropped."""
    names = sorted(map(str.lower, _TAG.findall(english)))
    if not names or names != sorted(map(str.lower, _TAG.findall(german))):
        return english, german
    return _without_tags(english), _without_tags(german)


def _without_tags(text: str) -> str:
    return _TAG.sub("", _BREAK.sub("\n\n", text))


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a message; each line of a list is a paragraph."""
    text = text.replace("\r\n", "\n").strip()
    paragraphs: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.split("\n")
        if any(map(_LIST_LINE.match, lines)):
            paragraphs.extend(lines)
        elif len(lines) > 1 and len(lines[0].split()) <= 3 and re.match(r"\s{2}", lines[1]):
            paragraphs.extend((lines[0], " ".join(lines[1:])))  # a term and its definition
        else:
            paragraphs.append(" ".join(lines))
    return paragraphs


def _tidy(text: str) -> str:
    """A paragraph on one line, without a list mark and without invisible hyphens and spaces."""
    text = unicodedata.normalize("NFC", text).replace("\u00ad", "").replace("\u200b", "")
    text = _LIST_LINE.sub("", text)
    return " ".join(text.split())


def _strip_ui_markup(english: str, german: str) -> Pair:
    """Remove the marks of menus and forms.

    These are the mark of a keyboard shortcut (`&Open`, `Save _as`), if a side has exactly one, and "...", "…"
    or ":" at the end, if both sides have one there.
    """
    sides = [english, german]
    # A word with an inner underscore in both sides is a name, not a shortcut.
    tags = set(_INNER_UNDERSCORE.findall(english)) & set(_INNER_UNDERSCORE.findall(german))
    for number, side in enumerate(sides):
        if len(re.findall(r"&(?=\w)(?!\w+;)", side)) == 1:
            side = re.sub(r"&(?=\w)", "", side)
        if side.count("_") == 1 and not tags:
            side = re.sub(r"_(?=\w)", "", side)
        sides[number] = side
    english, german = sides
    if _TAIL.search(english) and _TAIL.search(german):
        return _TAIL.sub("", english), _TAIL.sub("", german)
    return english, german


def _is_plain(text: str) -> bool:
    """Whether a text is mostly Latin letters, without code, markup, placeholders or symbols."""
    if not text or "_" in text or "&" in text.replace(" & ", " "):
        return False
    if (
        _NOT_PLAIN.search(_PERCENT.sub(" ", text))
        or _MOJIBAKE.search(text)
        or _IDENTIFIER.search(text)
    ):
        return False
    if not _UNWANTED.isdisjoint(map(unicodedata.category, text)):
        return False
    if text.count("(") != text.count(")") or text.count('"') % 2 or text[0] in ",.;:!?)/+%":
        return False
    letters = "".join(filter(str.isalpha, text))
    visible = len(text) - text.count(" ")
    return len(letters) >= 0.7 * visible and max(letters, default="") < "\u0250"


def matching_key(text: str) -> str:
    """The key by which two lines count as the same sentence: their letters and digits in one case.

    Returns "" for a line with neither letters nor digits.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"[^\W_]+", folded))
