"""Properties of languages by their codes."""

import re

# Languages written without spaces between words, by their codes (ISO 639-1 and 639-3). In Korean, spaces
# separate phrases.
_WITHOUT_SPACES = ("zh", "ja", "ko", "th", "km", "my", "lo", "yue", "bo", "dz")
_CODES = {
    "zho": "zh",
    "chi": "zh",
    "cmn": "zh",
    "jpn": "ja",
    "kor": "ko",
    "tha": "th",
    "khm": "km",
} | {
    "mya": "my",
    "bur": "my",
    "lao": "lo",
    "bod": "bo",
    "tib": "bo",
    "dzo": "dz",
}


def language_of(code: str) -> str:
    """The language of a code such as zh_CN, zho_Hans or ja, in ISO 639-1 if it has such a code."""
    language = re.split("[-_]", code.lower())[0]
    return _CODES.get(language, language)


def writes_no_spaces(lang: str) -> bool:
    """True for languages written without spaces between words, tokenised or not."""
    return language_of(lang) in _WITHOUT_SPACES
