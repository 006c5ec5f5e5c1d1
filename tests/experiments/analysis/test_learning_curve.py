"""Learning curves from fairseq's log lines: repeats, resumed trainings, damage."""

import json

import pytest

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.learning_curve import (
    draw_learning_curves,
    read_learning_curve,
)


def inner(updates, ppl, wall):
    return json.dumps(
        {"epoch": 1, "ppl": str(ppl), "num_updates": str(updates), "wall": str(wall)}
    )


def valid(updates, ppl):
    values = {"valid_ppl": str(ppl), "valid_nll_loss": "1", "valid_num_updates": str(updates)}
    return json.dumps({"epoch": 1, **values})


def epoch_end(updates):
    return json.dumps(
        {"epoch": 1, "train_ppl": "9", "train_num_updates": str(updates), "train_wall": "99"}
    )


def curve(tmp_path, *lines, metric="ppl"):
    folder = tmp_path / "some_run"
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return read_learning_curve(folder, metric)


def test_points_of_both_kinds(tmp_path):
    read = curve(
        tmp_path, "plain text", inner(5, 80, 2), inner(10, 40, 4), valid(10, 50), epoch_end(10)
    )
    assert read.name == "some_run"
    assert read.train == [(5, 2.0, 80.0), (10, 4.0, 40.0)]
    assert read.valid == [(10, 4.0, 50.0)]


def test_lines_with_a_log_prefix_and_another_metric(tmp_path):
    prefix = "2024-01-01 00:00:00 | INFO | train_inner | "
    assert curve(tmp_path, prefix + inner(5, 80, 2)).train == [(5, 2.0, 80.0)]
    assert curve(tmp_path, valid(5, 80), metric="nll_loss").valid == [(5, None, 1.0)]


def test_a_log_of_epochs_alone_has_their_means_and_its_own_name(tmp_path):
    file = tmp_path / "dense.jsonl"
    file.write_text("\n".join((valid(10, 50), epoch_end(10), valid(20, 40), epoch_end(20))))
    read = read_learning_curve(file)
    assert read.name == "dense"
    assert read.train == [(10, None, 9.0), (20, None, 9.0)]
    assert read.valid == [(10, None, 50.0), (20, None, 40.0)]


@pytest.mark.parametrize("validations, marker", [(30, "o"), (31, "None")])
def test_dots_of_many_validations_do_not_hide_the_other_curves(tmp_path, validations, marker):
    read = curve(tmp_path, *(valid(10 * epoch, 50) for epoch in range(1, validations + 1)))
    (line,) = draw_learning_curves([read]).axes[0].get_lines()
    assert line.get_marker() == marker


def test_curves_of_one_picture_have_different_names(tmp_path, capsys):
    files = [tmp_path / place for place in ("a/log.json", "b/log.json", "b/v1.5/train.jsonl")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(valid(10, 50))
    runs = [*map(str, files[:2]), str(files[2].parent)]
    assert main(["analyze", "learning-curve", *runs, "--output", str(tmp_path / "c.png")]) == 0
    names = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert names == ["a/log", "b/log", "b/v1.5"]


def test_lines_written_several_times_count_once(tmp_path):
    lines = [
        inner(5, 80, 2),
        inner(5, 80, 2),
        valid(5, 70),
        valid(5, 70),
        inner(10, 60, 4),
        inner(10, 60, 4),
    ]
    read = curve(tmp_path, *lines)
    assert [point.updates for point in read.train] == [5, 10]
    assert len(read.valid) == 1


def test_a_resumed_training_replaces_what_it_repeats_and_its_clock_goes_on(tmp_path):
    before = [
        inner(5, 80, 10),
        inner(10, 60, 20),
        valid(10, 65),
        inner(15, 50, 30),
        inner(20, 45, 40),
    ]
    after = [inner(15, 51, 6), inner(20, 44, 12), valid(20, 46)]
    read = curve(tmp_path, *before, *after)
    assert read.train == [(5, 10, 80), (10, 20, 60), (15, 46, 51), (20, 52, 44)]
    assert read.valid == [(10, 20, 65), (20, 52, 46)]
    third = curve(tmp_path, *before, *after, inner(25, 43, 5))
    assert third.train[-1] == (25, 57, 43), "the clock of all three processes"


def test_updates_of_one_second_are_of_one_process(tmp_path):
    """fairseq's clock counts whole seconds."""
    lines = [
        inner(updates, 80 - updates, wall) for updates, wall in ((1, 2), (2, 2), (3, 2), (4, 3))
    ]
    assert [point.seconds for point in curve(tmp_path, *lines).train] == [2, 2, 2, 3]


def test_from_an_epoch_on_with_the_clock_of_the_whole_training(tmp_path):
    def at(epoch, line):
        return line.replace('"epoch": 1', f'"epoch": {epoch}')

    lines = [inner(5, 80, 10), valid(5, 70), at(2, inner(10, 60, 20)), at(2, valid(10, 65))]
    folder = tmp_path / "some_run"
    curve(tmp_path, *lines, at(3, inner(15, 50, 5)))
    read = read_learning_curve(folder, from_epoch=2)
    assert read.train == [(10, 20, 60), (15, 25, 50)] and read.valid == [(10, 20, 65)]
    assert read_learning_curve(folder, from_epoch=3).train == [(15, 25, 50)]
    with pytest.raises(UserError, match="lower --from-epoch"):
        read_learning_curve(folder, from_epoch=4)


def test_a_line_cut_off_by_a_crash_is_skipped(tmp_path):
    assert len(curve(tmp_path, inner(5, 80, 2), inner(10, 60, 4)[:-9]).train) == 1


def test_nothing_to_draw(tmp_path):
    with pytest.raises(UserError, match="--log-format json"):
        curve(tmp_path, "no records here")
    with pytest.raises(UserError, match=r"train\.jsonl does not exist"):
        read_learning_curve(tmp_path / "some_run" / "..")


def test_the_best_accuracy_is_the_highest(tmp_path, capsys):
    values = (
        {"valid_accuracy": str(accuracy), "valid_num_updates": str(at)}
        for at, accuracy in ((5, 30), (9, 20))
    )
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps({"epoch": 1, **each}) for each in values)
    )
    picture = tmp_path / "curve.png"
    words = f"analyze learning-curve {tmp_path} --metric accuracy --output {picture}".split()
    assert main(words) == 0 and picture.is_file()
    assert "best valid accuracy 30 after 5 updates" in capsys.readouterr().out
