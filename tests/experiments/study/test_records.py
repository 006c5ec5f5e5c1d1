"""What runs leave in a study's folder: a line each, whole or not at all, and an archive of translations."""

import hashlib
import json
import multiprocessing
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import archives
from moa_fairseq.experiments.data.archives import contents, pack
from moa_fairseq.experiments.records import json_files
from moa_fairseq.experiments.records.json_files import append_json_line, read_json_lines
from moa_fairseq.experiments.scoring.generate_log import read_lines
from moa_fairseq.experiments.study import records
from moa_fairseq.experiments.study.records import (
    append_record,
    outputs_of,
    pack_study,
    records_of,
    write_output,
)


def made(system="A", seed=1, **values):
    run = {"study": "toy", "system": system, "seed": seed, "end": "finished", "curve": []}
    return {**run, "parameters": 1000, "tokens_per_second": 9.5, **values}


def ends(folder):
    return {key: record.content["end"] for key, record in records_of(folder).items()}


@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029"])
def test_only_a_line_feed_ends_a_record(tmp_path, mark):
    path = tmp_path / "records.jsonl"
    record = {"text": f"one{mark}other"}
    path.write_text(f"{json.dumps(record, ensure_ascii=False)}\n" * 2, encoding="utf-8")
    assert read_json_lines(path, "") == {1: record, 2: record}


def test_a_last_record_with_its_line_end_is_damaged_and_not_cut_off(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 1}\n{"b": \n')
    with pytest.raises(UserError, match="line 2"):
        read_json_lines(path, "")


texts = st.dictionaries(st.text(max_size=3), st.text() | st.integers(), max_size=2)


@settings(max_examples=settings.default.max_examples // 2)
@given(st.lists(texts, min_size=1, max_size=3), st.data())
def test_lines_up_to_any_byte_are_read_and_the_next_line_takes_its_place(
    tmp_path, values, data
):
    """Editors leave a whole last line without its end, and a kill may fall there."""
    path = tmp_path / "records.jsonl"
    content = "".join(f"{json.dumps(value)}\n" for value in values).encode()
    ends = [place for place, byte in enumerate(content) if byte == ord("\n")]
    cut = data.draw(st.integers(0, len(content)) | st.sampled_from(ends))
    path.write_bytes(content[:cut])
    rows = values[: sum(end <= cut for end in ends)]
    messages = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_files.log, "warning", lambda *words: messages.append(words[1:]))
        assert read_json_lines(path, "") == dict(enumerate(rows, 1))
    is_cut = cut not in (0, *ends, *(end + 1 for end in ends))
    assert messages == [(path, len(rows) + 1)] * is_cut
    append_json_line(path, {"next": 1})
    rows = "".join(f"{json.dumps(row)}\n" for row in [*rows, {"next": 1}])
    assert path.read_text() == rows


def test_a_rerun_takes_the_place_of_what_was_recorded(tmp_path):
    for end in ("diverged", "finished"):
        append_record(tmp_path, made(end=end))
    assert ends(tmp_path) == {("A", 1): "finished"}


def test_the_marks_of_a_merge_are_named_by_their_line_and_cost_no_record(tmp_path):
    path = tmp_path / "records.jsonl"
    for seed in (1, 2):
        append_record(tmp_path, made(seed=seed))
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(f"{first}<<<<<<< HEAD\n{second}=======\n{second}>>>>>>> theirs\n")
    with pytest.raises(
        UserError, match=r"records\.jsonl .*line 2: .*that entry alone"
    ) as refused:
        records_of(tmp_path)
    assert "Delete" not in str(refused.value)
    path.write_text(
        "".join(line for line in path.read_text().splitlines(keepends=True) if line[0] == "{")
    )
    assert list(ends(tmp_path)) == [("A", 1), ("A", 2)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"end": "killed"}, "end.*killed.*finished.*diverged"),
        ({"parameters": ...}, "parameters"),
        ({"tokens_per_second": ...}, "tokens_per_second"),
        ({"curve": [{"updates": "1", "valid": 3.0}]}, "curve.*updates"),
    ],
)
def test_what_no_run_writes_is_refused_by_its_line_and_key(tmp_path, change, named):
    append_record(tmp_path, made())
    content = {key: value for key, value in made(seed=2, **change).items() if value is not ...}
    append_record(tmp_path, content)
    with pytest.raises(UserError, match=rf"records\.jsonl, line 2.*{named}"):
        records_of(tmp_path)
    (tmp_path / "records.jsonl").unlink()
    (tmp_path / "A-seed2.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"A-seed2\.json.*{named}"):
        records_of(tmp_path)


def test_a_run_that_ended_too_early_has_no_speed(tmp_path):
    append_record(tmp_path, made(end="diverged", parameters=None, tokens_per_second=None))
    assert ends(tmp_path) == {("A", 1): "diverged"}


def test_lines_are_on_the_disk_before_a_run_has_its_record(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    append_record(tmp_path, made())
    assert (tmp_path / "records.jsonl").stat().st_size in synced


def test_lines_of_many_writers_are_all_there(tmp_path):
    path = tmp_path / "records.jsonl"

    def write(system):
        for seed in range(20):
            append_json_line(path, made(system, seed, command="x" * 5000))

    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write, args=(system,)) for system in "ABCD"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert set(ends(tmp_path)) == {(system, seed) for system in "ABCD" for seed in range(20)}


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "other").write_text("x")
    (tmp_path / "records.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="is a link"):
        append_record(tmp_path, made())


@pytest.fixture
def folder(tmp_path):
    """With a line, a file of its own for the same run and one for another, and a translation of each."""
    append_record(tmp_path, made(end="diverged"))
    for system, seed in (("B", 2), ("A", 1)):
        (tmp_path / f"{system}-seed{seed}.json").write_text(json.dumps(made(system, seed)))
        write_output(tmp_path, f"{system}-seed{seed}", "test", ["Ein Satz .", "Ü"])
    (tmp_path / "report-9-seeds.json").write_text("{}")
    return tmp_path


def test_records_that_are_files_are_read_and_packed(folder):
    before = ends(folder)
    texts = outputs_of(folder)
    assert before == {("A", 1): "finished", ("B", 2): "finished"}
    assert pack_study(folder) == (2, 2) and pack_study(folder) == (0, 0)
    names = {path.name for path in folder.iterdir()}
    assert names == {"records.jsonl", "outputs.tar.xz", "outputs.sha256", "report-9-seeds.json"}
    assert ends(folder) == before and outputs_of(folder) == texts
    sums = [line.split("  ") for line in (folder / "outputs.sha256").read_text().splitlines()]
    assert sums == [[hashlib.sha256(texts[name]).hexdigest(), name] for name in sorted(texts)]
    assert read_lines(folder / "outputs.tar.xz" / "A-seed1.test.txt") == ["Ein Satz .", "Ü"]
    with pytest.raises(UserError, match=r"outputs\.tar\.xz holds no C-seed1\.test\.txt"):
        read_lines(folder / "outputs.tar.xz" / "C-seed1.test.txt")


@pytest.mark.parametrize("name", ["A-seed1.json", "outputs/A-seed1.test.txt", "outputs.tar.xz"])
def test_a_link_that_leads_out_of_a_study_is_not_packed(folder, name, tmp_path_factory):
    """A study's folder from somebody else could name any file with it, to be given away."""
    private = tmp_path_factory.mktemp("private")
    pack(private / "outputs.tar.xz", {"secret": b"secret"})
    (private / "A-seed1.json").write_text(json.dumps(made(secret=1)))
    write_output(private, "A-seed1", "test", ["secret"])
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private / name)
    before = sorted((path, path.is_symlink()) for path in folder.rglob("*"))
    with pytest.raises(UserError, match=re.escape(str(private / name))):
        pack_study(folder)
    assert sorted((path, path.is_symlink()) for path in folder.rglob("*")) == before


def test_a_later_translation_takes_the_place_of_a_packed_one(folder):
    pack_study(folder)
    write_output(folder, "A-seed1", "test", ["anders"])
    assert outputs_of(folder)["A-seed1.test.txt"] == b"anders\n"
    pack_study(folder)
    assert (
        outputs_of(folder)["A-seed1.test.txt"] == b"anders\n" and len(outputs_of(folder)) == 2
    )


@pytest.mark.parametrize("step", ["append_record", "pack", "atomic_write"])
def test_nothing_is_lost_where_packing_ends_early(folder, monkeypatch, step):
    before = ends(folder)
    texts = outputs_of(folder)

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(records, step, stop)
        pack_study(folder)
    assert ends(folder) == before and outputs_of(folder) == texts
    pack_study(folder)
    assert ends(folder) == before and outputs_of(folder) == texts


def test_what_is_packed_while_it_is_read_is_not_missed(folder, monkeypatch):
    """By somebody else, who reports the study meanwhile."""
    before = ends(folder)
    texts = outputs_of(folder)

    def packed_behind(name):
        read = getattr(records, name)

        def reading(*words):
            found = read(*words)
            monkeypatch.setattr(records, name, read)
            pack_study(folder)
            return found

        monkeypatch.setattr(records, name, reading)

    packed_behind("_single_outputs")
    assert outputs_of(folder) == texts
    write_output(folder, "A-seed1", "test", ["neu"])
    (folder / "C-seed3.json").write_text(json.dumps(made("C", 3)))
    packed_behind("read_json_lines")
    assert ends(folder) == before | {("C", 3): "finished"}


def test_a_packed_text_that_is_not_utf_8_is_named(tmp_path):
    pack(tmp_path / "outputs.tar.xz", {"A-seed1.test.txt": b"gut\n\xfc\n"})
    with pytest.raises(UserError, match=r"A-seed1\.test\.txt, line 2: byte 0xfc .* Unpack"):
        read_lines(tmp_path / "outputs.tar.xz" / "A-seed1.test.txt")


def test_an_archive_follows_from_its_files_alone(tmp_path):
    files = {"b": b"2", "a/c": b"1"}
    for name, order in (("one", sorted(files)), ("two", sorted(files, reverse=True))):
        pack(tmp_path / f"{name}.tar.xz", {key: files[key] for key in order})
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "two.tar.xz").read_bytes()
    assert contents(tmp_path / "one.tar.xz") == files


def test_an_archive_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MOST_BYTES", 10)
    pack(tmp_path / "x.tar.xz", {"a": b"12345", "b": b"123456"})
    with pytest.raises(UserError, match="more than 10 bytes"):
        contents(tmp_path / "x.tar.xz")


def test_single_files_are_known_by_their_names(tmp_path):
    for name in ("report.json", "report-9-seeds.json", "A-seed1.json.bak"):
        Path(tmp_path / name).write_text("no record")
    assert records_of(tmp_path) == {}
