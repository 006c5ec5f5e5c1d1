"""What `moa-fairseq` says of words that it does not know."""

import pytest

from moa_fairseq.cli import main


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
