"""fairseq's JSON lines: parsing, pruning on resume, summing up."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes import train_log
from moa_fairseq.experiments.recipes.train_log import (
    TrainLog,
    parse_record,
    prune,
    read_records,
    summarise,
)
from moa_fairseq.plugin.patches import kernel_check

SKIPPED = (
    "2026-01-01 00:00:00 | WARNING | fairseq.tasks.fairseq_task | 12 samples have invalid sizes and will be "
    "skipped, max_positions=(128, 128), first few sample ids=[3, 5]"
)
PREFIX = "2026-01-01 00:00:00 | INFO | train_inner | "


def inner(updates, loss="9.0"):
    return {
        "epoch": 1,
        "update": updates / 4,
        "loss": loss,
        "wps": "100",
        "num_updates": str(updates),
    }


def end_of_epoch(epoch, updates, wpb, wps="100"):
    numbers = {"train_num_updates": str(updates), "train_wpb": str(wpb)}
    return {"epoch": epoch, "train_loss": "8", "train_wps": wps, **numbers}


def valid(epoch, updates, ppl):
    return {
        "epoch": epoch,
        "valid_loss": "7",
        "valid_ppl": ppl,
        "valid_num_updates": str(updates),
    }


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def test_parse_record():
    assert parse_record(PREFIX + json.dumps(inner(3))) == inner(3)
    assert parse_record(json.dumps(inner(3))) == inner(3)
    assert parse_record(PREFIX + "{not json") is None
    assert parse_record(PREFIX + '{"other": 1}') is None
    assert parse_record("2026 | INFO | fairseq.trainer | begin training") is None


def test_records_and_parameters_are_collected(tmp_path, capsys):
    log = TrainLog(tmp_path / "train.jsonl", max_epoch=2, max_update=None)
    log("... | num. shared model params: 1,234,567 (num. trained: 1,234,567)")
    log("... | num. expert model params: 0 (num. trained: 0)")
    records = [inner(1), inner(2), valid(1, 2, "55.5"), end_of_epoch(1, 2, 3)]
    for record in records:
        log(PREFIX + json.dumps(record))
    assert list(read_records(tmp_path / "train.jsonl")) == records
    assert sum(log.parameters) == 1234567
    assert "valid ppl 55.5" in capsys.readouterr().out


def test_going_on_takes_away_what_will_be_written_again(tmp_path):
    path = tmp_path / "train.jsonl"
    write(path, [inner(1), inner(2), inner(3)])
    TrainLog(path, 2, None)("Loaded checkpoint x/checkpoint_last.pt (epoch 1 @ 2 updates)")
    assert list(read_records(path)) == [inner(1), inner(2)]
    before = path.stat().st_mtime_ns
    prune(path, 2)  # nothing to do: the file is left alone
    assert path.stat().st_mtime_ns == before


@given(st.integers(1, 3), st.data())
def test_a_line_that_a_crash_cut_off_costs_no_other(tmp_path, count, data):
    path = tmp_path / "train.jsonl"
    write(path, map(inner, range(count)))
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    rows = [inner(number) for number in range((content[:cut] + b"\n").count(b"}\n"))]
    assert list(read_records(path)) == rows
    TrainLog(path, 2, None)(PREFIX + json.dumps(inner(9)))
    assert list(read_records(path)) == [*rows, inner(9)]


def test_summary_weighs_speed_by_time(tmp_path):
    path = tmp_path / "train.jsonl"
    rows = ((1, 4, 250, "100"), (2, 6, 5, "999"), (2, 8, 1500, "200"), (3, 9, 700, "inf"))
    epochs = [end_of_epoch(*row) for row in rows]  # the third was too short for a speed
    write(path, [epochs[0], valid(1, 4, "50"), *epochs[1:], valid(2, 8, "40")])
    assert summarise(path) == {
        "updates": 9,
        "epochs": 3,
        "train_seconds": 40.0,
        "tokens_per_second": (10 * 100 + 30 * 200) / 40,
        "valid_ppl": 40.0,
    }
    assert summarise(tmp_path / "none.jsonl")["updates"] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_disk_names_the_log():
    with pytest.raises(UserError, match="disk is full while writing /dev/full"):
        TrainLog(Path("/dev/full"), 3, None)(PREFIX + "| " + json.dumps(inner(1)))


def test_what_a_training_does_to_the_kernels_is_shown(tmp_path, capsys):
    log = TrainLog(tmp_path / "train.jsonl", max_epoch=2, max_update=None)
    log(f"2026-01-01 00:00:00 | INFO | {kernel_check.logger.name} | checking")
    assert capsys.readouterr().out == "  checking\n"


def test_the_time_left_is_reckoned_from_this_sessions_updates(tmp_path, capsys, monkeypatch):
    """Six of ten updates were made before: two more in 60 seconds leave two for another 60."""
    clock = iter((1000.0, 1060.0))
    monkeypatch.setattr(train_log.time, "monotonic", lambda: next(clock))
    log = TrainLog(tmp_path / "train.jsonl", max_epoch=None, max_update=10)
    for updates in (6, 8):
        log(PREFIX + json.dumps(inner(updates)))
    first, second = capsys.readouterr().out.splitlines()
    assert "left" not in first and second.endswith("about 0:01:00 left")


def test_the_first_record_of_a_new_training_tells_the_time_left(tmp_path, capsys, monkeypatch):
    """One of four epochs in 30 seconds, whose lines are rarer than its ends, leaves three for another 90."""
    clock = iter((1000.0, 1030.0, 1120.0))
    monkeypatch.setattr(train_log.time, "monotonic", lambda: next(clock))
    log = TrainLog(tmp_path / "train.jsonl", max_epoch=4, max_update=None)
    log(PREFIX + "Start iterating over samples")
    for epoch in (1, 4):
        log(
            PREFIX
            + json.dumps(
                {"epoch": epoch, "train_loss": "5", "train_wps": "9", "train_num_updates": "3"}
            )
        )
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith("about 0:01:30 left") and "left" not in last


def test_sentences_that_fairseq_skips_are_shown_once(tmp_path, capsys):
    log = TrainLog(tmp_path / "train.jsonl", max_epoch=2, max_update=None)
    for _ in range(3):
        log(SKIPPED)
        log("2026-01-01 00:00:00 | INFO | fairseq.trainer | AMP: skipping this batch.")
    out = capsys.readouterr().out
    assert out.count("12 samples have invalid sizes and will be skipped") == 1
    assert out.count("skipping this batch") == 1
