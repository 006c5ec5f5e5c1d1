"""A stage's folder appears whole or not at all, and is made again only when it must be."""

import errno
import os

import pytest

from moa_fairseq.data_prep.stage_folder import FileMemory, build_folder, fingerprint_of, read_mark
from moa_fairseq.errors import UserError
from moa_fairseq.files import disk_errors


def writer(text, calls):
    def build(folder):
        calls.append(text)
        (folder / "file").write_text(text)
        return {"text": text}

    return build


def test_built_once(tmp_path, said):
    calls = []
    for _ in range(2):
        assert build_folder(tmp_path / "x", "1", writer("a", calls)) == {"text": "a"}
    assert calls == ["a"]
    assert said == [f"{tmp_path / 'x'}: up to date"]


@pytest.mark.parametrize(
    "damage", [lambda f: f.unlink(), lambda f: f.write_text("half"), lambda f: f.write_text("")]
)
def test_damage_is_found_and_mended(tmp_path, damage):
    calls = []
    build_folder(tmp_path / "x", "1", writer("whole", calls))
    damage(tmp_path / "x" / "file")
    build_folder(tmp_path / "x", "1", writer("whole", calls))
    assert len(calls) == 2
    assert (tmp_path / "x" / "file").read_text() == "whole"


def test_a_failure_leaves_the_old_folder(tmp_path):
    build_folder(tmp_path / "x", "1", writer("old", []))

    def fail(folder):
        (folder / "file").write_text("new")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match="disk is full"):
        build_folder(tmp_path / "x", "2", fail)
    assert (tmp_path / "x" / "file").read_text() == "old"
    build_folder(tmp_path / "x", "2", writer("new", []))
    assert (tmp_path / "x" / "file").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]


def test_an_interrupt_leaves_nothing_that_looks_finished(tmp_path):
    def interrupt(folder):
        (folder / "file").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_folder(tmp_path / "x", "1", interrupt)
    assert not (tmp_path / "x").exists()
    assert read_mark(tmp_path / "x.partial") == {}


def test_fingerprints_tell_values_apart():
    assert fingerprint_of({"a": 1, "b": 2}) == fingerprint_of({"b": 2, "a": 1})
    assert len({fingerprint_of(1), fingerprint_of("1"), fingerprint_of(1, 2), fingerprint_of([1, 2])}) == 4


def test_digests_follow_the_content(tmp_path):
    path, memory = tmp_path / "a.txt", tmp_path / "memory.json"
    path.write_text("one")
    first = FileMemory(memory).checksum(path)
    assert FileMemory(memory).checksum(path) == first
    path.write_text("two")
    assert FileMemory(memory).checksum(path) != first


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "x").write_text("a file")
    for folder in (tmp_path / "x", tmp_path / "x" / "below"):  # EEXIST and ENOTDIR
        with pytest.raises(UserError, match=f"Cannot write {folder}: "), disk_errors(folder):
            folder.mkdir(parents=True)
