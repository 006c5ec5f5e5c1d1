"""What `moa-fairseq` says of words that it does not know."""

import errno
import os
import subprocess
import sys
from pathlib import Path

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


def test_help_is_utf8_in_any_locale():
    environment = {**os.environ, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "moa_fairseq.cli", "score", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stdout.decode("utf-8").isascii()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_disk_behind_the_standard_output_is_named(tmp_path, monkeypatch, capsys):
    """Of a few lines Python writes the first when the program ends."""
    log = "S-0\ta b\nT-0\ta b c d\nH-0\t-1\ta b c d\n| Generate test with beam=5: x\n"
    (tmp_path / "log.txt").write_text(log)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["score", str(tmp_path / "log.txt")]) == 2
    assert "No space left" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("place", ["argument", "folder"])
def test_a_name_that_is_not_utf8_is_refused(capsys, monkeypatch, tmp_path, place):
    """JSON and scripts that would name it are UTF-8."""
    name = os.fsdecode(b"a\xff")
    if place == "folder":
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
    assert main(["score", name if place == "argument" else "log.txt"]) == 2
    assert "a\\udcff: " in capsys.readouterr().err


def test_an_error_of_no_file_is_not_taken_for_the_standard_output(capsys, monkeypatch):
    def run(args):
        # As of a standard input that is a folder
        raise IsADirectoryError(errno.EISDIR, "Is a directory")

    monkeypatch.setattr("moa_fairseq.experiments.scoring.score.run", run)
    assert main(["score", "x"]) == 2
    message = capsys.readouterr().err
    assert "Is a directory" in message and "standard output" not in message
