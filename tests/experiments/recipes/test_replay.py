"""What a recipe shows and keeps of its commands makes the same run in an empty folder."""

import json
import shlex
from pathlib import Path

import pytest

from moa_fairseq.cli import main
from moa_fairseq.plugin.fairseq_compat import load_checkpoint
from moa_fairseq.process import MODULES

pytestmark = pytest.mark.usefixtures("forked_commands")


def replay(lines, folder, fairseq):
    """What a shell does with the lines of a script, each program in a process of its own."""
    folder.mkdir()
    for line in lines:
        words = shlex.split(line, comments=True)
        if not words or words[0] in ("set", "#!/usr/bin/env"):
            continue
        command, _, output = line.partition(" > ")
        program, *words = shlex.split(command)
        assert program in MODULES
        done = fairseq(
            program.replace("moa-fairseq", "moa").removeprefix("fairseq-"), *words, cwd=folder
        )
        if output:
            (folder / output).write_text(done.stdout)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_commands_make_the_same_run_elsewhere(
    small, write_config, write_text, tmp_path, monkeypatch, fairseq, capsys
):
    text = write_text(tmp_path / "text", "klm", 40, 6)
    small["train"].update(max_epoch=2, keep_last_epochs=2)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    line = f"recipe {write_config(small)} --data {text} --gpus 0 --save-dir run".split()
    assert main([*line, "--set", "data.bpe=40", "--dry-run"]) == 0
    shown = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("$ ")]
    assert main([*line, "--set", "data.bpe=40"]) == 0
    kept = Path("run/commands.sh").read_text().splitlines()
    assert [line for line in kept[3:] if not line.startswith("#")] == shown
    # What the first line runs, as a comment
    assert sum("fairseq-preprocess" in line for line in kept) == 1
    monkeypatch.chdir(tmp_path)
    replay(kept, tmp_path / "there", fairseq)
    models = []
    scores = []
    for folder in ("here", "there"):
        models.append(load_checkpoint(tmp_path / folder / "run" / "average.pt")["model"])
        scores.append(json.loads((tmp_path / folder / "run" / "score-test.json").read_text()))
    assert scores[0] == scores[1] and all(
        (models[0][name] == models[1][name]).all() for name in models[0]
    )
