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
_LIST_LINE = re.compile(r"^\s*(?:[-*•+#]|\d+[.)])\s")
_WORD = re.compile(r"\w+(?:['’-]\w+)*")


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
        pair = _strip_ui_marks(_tidy(source), _tidy(target))
        if is_translation(*pair):
            yield pair
        else:
            yield from _sentence_pairs(*pair)


_TAG = re.compile(
    r"</?(a|abbr|b|big|br|div|em|h[1-6]|i|li|p|small|span|strong|u|ul)\b[^<>]*>", re.IGNORECASE
)
# Tags that end a paragraph, and a bold line that is the heading of what follows.
_PARAGRAPH_END = re.compile(
    r"<(?:br|/?p|/?div|/?li|/?h[1-6])\b[^<>]*>|</(?:b|strong)>[ ]*\n", re.IGNORECASE
)


def _strip_tags(english: str, german: str) -> Pair:
    """Remove inline markup if both sides have the same tags; other markup stays, so the pair is dropped."""
    names = sorted(map(str.lower, _TAG.findall(english)))
    if names != sorted(map(str.lower, _TAG.findall(german))):
        return english, german
    return _without_tags(english), _without_tags(german)


def _without_tags(text: str) -> str:
    return _TAG.sub("", _PARAGRAPH_END.sub("\n\n", text))


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


_ENTRY_END = re.compile(r"\s?(?:\.\.\.|…|:)$")  # of a menu or a form


def _strip_ui_marks(english: str, german: str) -> Pair:
    """Remove the marks of keyboard shortcuts, and "...", "…" or ":" if both sides end in one."""
    names = set(re.findall(r"\w+_\w+", english)) & set(re.findall(r"\w+_\w+", german))
    english = _strip_shortcut(english, names)
    german = _strip_shortcut(german, names)
    if _ENTRY_END.search(english) and _ENTRY_END.search(german):
        return _ENTRY_END.sub("", english), _ENTRY_END.sub("", german)
    return english, german


def _strip_shortcut(text: str, names: set[str]) -> str:
    """Remove the mark of a shortcut (`&Open`, `Save _as`) if there is one mark, and not a name with "_"."""
    if len(re.findall(r"&(?=\w)(?!\w+;)", text)) == 1:
        text = re.sub(r"&(?=\w)", "", text)
    if text.count("_") == 1 and not names:
        text = re.sub(r"_(?=\w)", "", text)
    return text


_SENTENCE_END = re.compile(r"(?<=[a-zäöüß)][.!?])\s+(?=[A-ZÄÖÜ])")


def _sentence_pairs(english: str, german: str) -> Iterator[Pair]:
    """The translations among the sentences of a paragraph: a placeholder spoils only its own sentence."""
    sources = _SENTENCE_END.split(english)
    targets = _SENTENCE_END.split(german)
    if len(sources) != len(targets) or len(sources) == 1:
        return
    for pair in zip(sources, targets):
        if is_translation(*pair):
            yield pair


# "Fula (Latin) (Guinea)": an entry of a list of languages or places.
_QUALIFIED_NAME = re.compile(r"\w+(?: \([A-Z][^()]*\))+")


def is_translation(english: str, german: str) -> bool:
    """Whether two tidied lines look like a human English-German sentence pair worth training on."""
    return (
        _is_plain(english)
        and _is_plain(german)
        and _QUALIFIED_NAME.fullmatch(english) is None
        and _have_similar_lengths(english, german)
        and _numbers(english) == _numbers(german)
        and _germanness(english) <= 0 <= _germanness(german)
        and _have_different_words(english, german)
    )


# Anything here means code, markup or a placeholder; such a message is dropped completely,
# because a sentence with its placeholder cut out is no longer a sentence.
_NOT_PLAIN = re.compile(
    r"""
      %\w|%[^\s\w.,;:!?)]|%\s*\(      # %s, %1, %(name)s; "20 %" and "5%." are prose: see _PERCENT
    | [_{}<>\[\]\\|`~^=@\#*$]           # {name}, <b>, [link], \path, a|b, ``code``, e-mail, *bold*, $x
    | ''|[→←↑↓█·″′]                    # wiki quotes, menu arrows, bars
    | ://|\bwww\.                       # addresses
    | \w\(\)|::|->|--|\+\+              # calls, scopes, arrows, command-line options
    | \b[a-z][a-z0-9]*[A-Z]             # names such as fileName
    | (?<!\w)[/~]\w+/|\w/\w+/           # file paths
    | \w\.(?:py|html?|xml|json|ya?ml|css|js|txt|csv|ini|cfg|po|mo|sh|org|com|net|de)\b
    | (?:^|\s)[•–-]\s.*\s[•–-]\s        # lists run together
    | \.\.\.\s*\S+.*\.\.\.              # ellipses with gaps for run-time text
    | Ã[\x80-\xbf„œŸ¤¶¼]|Â[\xa0-\xbf]|â€|\ufffd|[\x80-\x9f]   # text in the wrong encoding
    """,
    re.VERBOSE,
)
_PERCENT = re.compile(r"(?<=\d)\s?%(?=$|[\s.,;:!?)])")
# Control and format characters, symbols and emoji, and the marks that modify them.
_UNWANTED = {"Cc", "Cf", "Co", "Cn", "Cs", "So", "Sk", "Mn", "Me"}


def _is_plain(text: str) -> bool:
    """Whether a text is mostly Latin letters, without code, markup, placeholders or symbols."""
    if not text or text[0] in ",.;:!?)/+%" or "&" in text.replace(" & ", " "):
        return False
    if _NOT_PLAIN.search(_PERCENT.sub(" ", text)):
        return False
    if text.count("(") != text.count(")") or text.count('"') % 2:
        return False
    if _UNWANTED.intersection(map(unicodedata.category, text)):
        return False
    letters = list(filter(str.isalpha, text))
    visible = len(text) - text.count(" ")
    return len(letters) >= 0.7 * visible and max(letters, default="") < "\u0250"


def _have_similar_lengths(english: str, german: str) -> bool:
    """Whether the lengths of both sides are within the limits of a pair."""
    fewest = min(len(_words(english)), len(english.split()))
    most = max(len(english.split()), len(german.split()))
    # Short labels vary more: six characters of slack keep "Log out of it" / "Abmelden".
    short, long = sorted((len(english) + 6, len(german) + 6))
    has_ratio = long <= MAX_CHARACTER_RATIO * short
    return fewest >= MIN_ENGLISH_WORDS and most <= MAX_WORDS and has_ratio


def _words(text: str) -> list[str]:
    # The dot of "İ" is a separate character after lower()
    return [word.lower() for word in _WORD.findall(text)]


def _numbers(text: str) -> list[str]:
    """The digits of each number, whatever its separators (1,000.5 / 1.000,5)."""
    return sorted(re.sub(r"\D", "", number) for number in re.findall(r"\d+(?:[.,:]\d+)*", text))


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
_ENGLISH = frozenset(ENGLISH_WORDS.split())
_GERMAN = frozenset(GERMAN_WORDS.split())


def _germanness(text: str) -> int:
    """The number of German function words and of words with ä, ö, ü or ß, minus English function words."""
    score = sum(bool(re.search("[äöüßÄÖÜ]", word)) for word in text.split())
    for word in _words(text):
        score += (word in _GERMAN) - (word in _ENGLISH)
    return score


def _have_different_words(english: str, german: str) -> bool:
    """Whether at most half of the words are the same, unlike in untranslated text and lists of names."""
    if english.casefold() == german.casefold():
        return False
    english_words = Counter(_words(english))
    german_words = Counter(_words(german))
    longest = max(english_words.total(), german_words.total())
    return (english_words & german_words).total() <= 0.5 * longest


def matching_key(text: str) -> str:
    """The key by which two lines count as the same sentence: their letters and digits in one case.

    Returns "" for a line with neither letters nor digits.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"[^\W_]+", folded))
