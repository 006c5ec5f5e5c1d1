"""What `moa-fairseq` says of words that it does not know."""

import os
import subprocess
import sys

import pytest

from moa_fairseq.cli import VERBS, main


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["recip", "x"], "recipe"),
        (["recipe", "quickstart_moa", "--dry-rum"], "--dry-run"),
        (["translate", "run", "--beem=3"], "--beam"),
        (["recipe", "quickstart_moa", "--stage", "trian"], "train"),
        (["analyze", "expert-token", "run"], "expert-tokens"),
        (["analyze", "expert-loads", "run"], "expert-load or expert-tokens"),
    ],
)
def test_a_mistyped_word_gets_the_nearest_one(capsys, words, meant):
    with pytest.raises(SystemExit):
        main(words)
    assert f"(did you mean {meant}" in capsys.readouterr().err


def test_a_word_like_no_other_gets_none(capsys):
    with pytest.raises(SystemExit):
        main(["recipe", "quickstart_moa", "--xyzzy"])
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.thorough(keep=("-compare", "-study"))
@pytest.mark.parametrize(
    "locale", [{"PYTHONUTF8": "0", "LC_ALL": "C"}, {"PYTHONIOENCODING": "latin-1"}], ids=str
)
@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_is_utf8_in_any_locale(verb, locale):
    environment = {**os.environ, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", **locale}
    command = [sys.executable, "-m", "moa_fairseq.cli", verb, "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode("utf-8").startswith(f"usage: moa-fairseq {verb}")
