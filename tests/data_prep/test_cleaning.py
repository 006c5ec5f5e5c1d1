"""The cleaner's rules, and agreement with Moses' own script where Perl and the scripts are at hand."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from moa_fairseq.data_prep.cleaning import Cleaning, clean

RULES = Cleaning(1, 5, 1.5)
SCRIPTS = os.environ.get("MOSES_SCRIPTS")


@pytest.mark.parametrize(
    ("source", "target", "result"),
    [
        ("a b c", "d e", ("a b c", "d e")),  # 1.5 is not above 1.5
        (" a  b\u00a0c ", "d\u3000e f", ("a b c", "d e f")),
        ("a | b", "c d", ("a b", "c d")),
        ("a b c d", "e f", "length ratio above 1.5"),
        ("e f", "a b c d", "length ratio above 1.5"),
        ("a b c d e f", "a b c d e", "longer than 5 tokens"),
        ("", "a", "empty side"),
        ("a", " \u2003", "empty side"),
        ("|", "a", "empty side"),
        ("x" * 1000, "y", ("x" * 1000, "y")),
        ("x" * 1001, "y", "token of more than 1000 characters"),
    ],
)
def test_rules(source, target, result):
    assert clean(source, target, RULES) == result


def test_too_short():
    assert clean("a b", "c", Cleaning(2, 9, 9)) == "shorter than 2 tokens"


def test_without_limits_text_is_untouched():
    assert clean(" a |  b ", "c", Cleaning()) == (" a |  b ", "c")
    assert clean(" ", "c", Cleaning()) == "empty side"


@pytest.mark.skipif(not SCRIPTS or not shutil.which("perl"), reason="needs perl and MOSES_SCRIPTS")
@pytest.mark.parametrize("rules", [Cleaning(1, 80, 9), Cleaning(1, 250, 1.5), Cleaning(3, 12, 1.2)])
def test_equals_perl(tmp_path, rules):
    generator = random.Random(5)
    pieces = ["a", "ß", "|", " ", " ", " ", "\u00a0", "\u2003", "\x85", "\t", "x" * 1001, "long words"]
    pairs = [
        ["".join(generator.choices(pieces, k=generator.randint(0, 30))) for _ in range(2)]
        for _ in range(2000)
    ]
    pairs[0] = ["no bar", "here"]
    for lang, lines in zip("ab", zip(*pairs)):
        (tmp_path / f"c.{lang}").write_bytes("".join(line + "\n" for line in lines).encode())
    script = Path(SCRIPTS) / "training" / "clean-corpus-n.perl"
    limits = [str(rules.min), str(rules.max)]
    subprocess.run(
        ["perl", str(script), "-ratio", str(rules.ratio), "c", "a", "b", "out", *limits],
        cwd=tmp_path,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    sides = [(tmp_path / f"out.{lang}").read_bytes().decode().split("\n")[:-1] for lang in "ab"]
    ours = [result for result in (clean(*pair, rules) for pair in pairs) if not isinstance(result, str)]
    assert ours == list(zip(*sides)) and 0 < len(ours) < len(pairs)
