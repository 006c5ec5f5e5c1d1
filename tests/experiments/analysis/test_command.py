"""The verb: a picture must be a PNG, and nothing that a run made is overwritten."""

import pytest

from moa_fairseq.cli import main


def test_what_cannot_be_drawn_is_said_before_anything_runs(tmp_path, capsys):
    flags = ["--output", str(tmp_path / "curve.svg")]
    assert main(["analyze", "learning-curve", str(tmp_path), *flags]) == 2
    assert "must end in .png" in capsys.readouterr().err
    flags = f"--output {tmp_path}/curve.png --from-epoch 0".split()
    assert main(["analyze", "learning-curve", str(tmp_path), *flags]) == 2
    assert "--from-epoch 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["state.json", "result.json", "score-test.json", "train.jsonl", "average.pt"]
)
def test_what_a_run_made_is_not_overwritten(name, tmp_path, capsys):
    made = tmp_path / name
    made.write_text("made by the run")
    flags = f"--output {tmp_path}/load.png --json {made}".split()
    assert main(["analyze", "expert-load", str(tmp_path), *flags]) == 2
    assert f"--json {made} is the same file as the input" in capsys.readouterr().err
    link = tmp_path / "curve.png"
    link.symlink_to(name)
    assert main(f"analyze learning-curve {made} --output {link}".split()) == 2
    assert f"--output {link} is the same file as the input" in capsys.readouterr().err
    assert made.read_text() == "made by the run"
