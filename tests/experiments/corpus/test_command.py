import json

import pytest

from moa_fairseq import cli
from moa_fairseq.experiments.corpus import command


@pytest.fixture
def arguments(make_wheel, catalogue, tmp_path, monkeypatch):
    pairs = [
        (f"The file of day {day} was saved", f"Die Datei vom Tag {day} wurde gespeichert")
        for day in range(10, 32)
    ]
    package, path = make_wheel("demo", {"a/locale/de/LC_MESSAGES/a.po": catalogue(pairs)})
    monkeypatch.setattr(command, "load_packages", lambda: [package])
    flags = {"--output": tmp_path / "out", "--cache": tmp_path / "c", "--from": path.parent}
    return ["corpus", *(str(word) for flag in flags.items() for word in flag)]


def test_summary_names_packages_splits_and_words(arguments, capsys):
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert "demo 1.0" in captured.out
    assert "22 unique pairs from 1 packages" in captured.out
    assert "train" in captured.out and "English words" in captured.out
    assert cli.main(arguments) == 0
    assert "already built, nothing to do" in capsys.readouterr().out


def test_json_is_all_there_is_on_stdout(arguments, capsys):
    assert cli.main([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["pairs"] == {"demo": 22}
    assert sum(split["pairs"] for split in summary["splits"].values()) == 22
    assert (
        summary["splits"]["train"]["english_words"] == 7 * summary["splits"]["train"]["pairs"]
    )
    assert summary["missing"] == []


def test_bad_folder_and_missing_wheel_end_with_one_message(arguments, capsys, tmp_path):
    assert cli.main([*arguments[:-1], str(tmp_path / "none")]) == 2
    assert "--from" in capsys.readouterr().err
    assert cli.main([*arguments[:-2], "--offline"]) == 2
    assert "demo-1.0" in capsys.readouterr().err
