"""Our text functions equal Moses' Perl scripts, whose output was recorded."""

import json
from pathlib import Path

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.text import normalize, tokenizer
from moa_fairseq.text.normalize import lowercase
from moa_fairseq.text.steps import (
    detokenize,
    normalize_punctuation,
    remove_nonprinting,
    replace_unicode_punctuation,
    tokenize,
)

RECORDED = json.loads(
    (Path(__file__).parent / "moses_recorded.json").read_text(encoding="utf-8")
)


def ours(command: str, line: str) -> str:
    script, *flags = command.split()
    lang = flags[flags.index("-l") + 1] if "-l" in flags else ""
    if script == "tokenizer.perl":
        return tokenize(
            line, lang, aggressive_hyphens="-a" in flags, escape="-no-escape" not in flags
        )
    if script == "normalize-punctuation.perl":
        return normalize_punctuation(line, lang)
    return {
        "remove-non-printing-char.perl": remove_nonprinting,
        "replace-unicode-punctuation.perl": replace_unicode_punctuation,
        "lowercase.perl": lowercase,
    }[script](line)


@pytest.mark.parametrize("command", RECORDED["perl"])
def test_equals_recorded_perl(command):
    outputs = RECORDED["perl"][command]
    assert len(outputs) == len(RECORDED["lines"]) >= 26
    for line, expected in zip(RECORDED["lines"], outputs):
        assert ours(command, line) == expected, f"{command} on {line!r}"


@pytest.mark.parametrize("command", RECORDED["languages"])
def test_rules_of_single_languages_equal_recorded_perl(command):
    for line, expected in RECORDED["languages"][command].items():
        assert ours(command, line) == expected, f"{command} on {line!r}"


def differs(script):
    """Whether some recorded line shows that a script's functions are not what they were."""
    recorded = {
        command: zip(RECORDED["lines"], outputs)
        for command, outputs in RECORDED["perl"].items()
    }
    recorded.update(
        {command: lines.items() for command, lines in RECORDED["languages"].items()}
    )
    return any(
        ours(command, line) != expected
        for command, lines in recorded.items()
        if command.startswith(script)
        for line, expected in lines
    )


def test_every_rule_of_normalization_has_a_recorded_line(monkeypatch):
    rules = normalize._normalization_rules
    unseen = []
    for rule in dict.fromkeys([*rules("de", "current"), *rules("en", "current")]):

        def others(lang, edition, rule=rule):
            return [row for row in rules(lang, edition) if row != rule]

        monkeypatch.setattr(normalize, "_normalization_rules", others)
        if not differs("normalize-punctuation.perl"):
            unseen.append(rule)
    # A later rule does the same, but in the edition of 2017.
    assert [pattern.pattern for _, pattern, _ in unseen] == ["([a-zA-Z])‘([a-zA-Z])"]
    monkeypatch.undo()
    assert normalize_punctuation("l‘eau", "fr", edition="2017-12") == "l'eau"


def test_every_sign_that_is_replaced_has_a_recorded_line(monkeypatch):
    for sign in normalize._UNICODE_TRANSLATION:
        table = {
            key: value for key, value in normalize._UNICODE_TRANSLATION.items() if key != sign
        }
        monkeypatch.setattr(normalize, "_UNICODE_TRANSLATION", table)
        assert differs("replace-unicode-punctuation.perl"), chr(sign)


@pytest.mark.parametrize("table", ["_COMMAS", "_ESCAPES", "en", "fr", "ca", "so"])
def test_every_rule_of_the_tokenizer_has_a_recorded_line(monkeypatch, table):
    of_language = table in tokenizer._APOSTROPHES
    rules = tokenizer._APOSTROPHES[table] if of_language else getattr(tokenizer, table)
    for rule in rules:
        rest = [row for row in rules if row != rule]
        if of_language:
            monkeypatch.setitem(tokenizer._APOSTROPHES, table, rest)
        else:
            monkeypatch.setattr(tokenizer, table, rest)
        assert differs("tokenizer.perl"), rule


def test_every_control_character_is_taken_out():
    for number in [*range(0x09), *range(0x0E, 0x20)]:
        assert tokenize(f"a{chr(number)}b", "en") == "ab"


def test_the_edition_of_december_2017_keeps_the_last_full_stop():
    assert tokenize("Platz 10.", "de", edition="2017-12") == "Platz 10."
    assert tokenize("Platz 10.", "de") == "Platz 10 ."
    assert normalize_punctuation("‚a‘ b", "de", edition="2017-12") == '"a" b'
    assert normalize_punctuation("‚a‘ b", "de") == "'a' b"


@pytest.mark.parametrize("edition", ["2017-12", "current"])
def test_what_both_editions_split_at_the_end_of_a_line(edition):
    assert tokenize("um 7,", "de", edition=edition) == "um 7 ,"
    # As Moses prints it: the rule for a quote after the last full stop adds blanks on both sides.
    assert tokenize("on a motorcycle .'", "en", edition=edition) == "on a motorcycle  . &apos; "


def test_chinese_words_stay_whole():
    assert tokenize("你好 世界", "de") == "你好 世界"


def test_a_comma_between_numbers_of_any_kind_stays():
    """As Perl's \\p{IsN}: a Roman number is one, too."""
    assert tokenize("Ⅳ,5 Ⅳ,Ⅴ Ⅳ,v", "de") == "Ⅳ,5 Ⅳ,Ⅴ Ⅳ , v"


def test_detokenize_undoes_tokenize():
    line = 'He said: "A well-known man isn\'t [now] & then."'
    assert detokenize(tokenize(line, "en", aggressive_hyphens=True), "en") == line


def test_another_edition_is_refused():
    with pytest.raises(UserError, match="2015"):
        tokenize("x", "de", edition="2015")


@pytest.mark.parametrize(
    "lang, known", [("fi", True), ("sv", True), ("ca", True), ("so", False), ("am", False)]
)
def test_a_language_without_a_list_has_the_english_one(lang, known):
    assert tokenizer.has_prefixes(lang) == known
    assert (
        tokenizer.nonbreaking_prefixes(lang) == tokenizer.nonbreaking_prefixes("en")
    ) != known


def test_unknown_edition_of_normalization_is_refused():
    with pytest.raises(UserError, match="2015"):
        normalize_punctuation("x", "de", edition="2015")
