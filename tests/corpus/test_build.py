import hashlib
import json
import types

import pytest

from moa_fairseq.corpus import build as build_module
from moa_fairseq.corpus.build import build as build_corpus
from moa_fairseq.data_prep.download import Unavailable
from moa_fairseq.errors import UserError

NOUNS = [("file", "Datei"), ("page", "Seite"), ("group", "Gruppe"), ("list", "Liste"), ("door", "Tür")]
VERBS = [
    ("saved", "gespeichert"),
    ("deleted", "gelöscht"),
    ("opened", "geöffnet"),
    ("found", "gefunden"),
    ("closed", "geschlossen"),
    ("moved", "verschoben"),
    ("changed", "geändert"),
    ("copied", "kopiert"),
]
FRAMES = [
    ("The {} was not {}.", "Die {} wurde nicht {}."),
    ("The {} has been {}.", "Die {} wurde {}."),
    ("This {} will be {}.", "Diese {} wird {} werden."),
]


def entries(frames):
    return [
        (english.format(noun[0], verb[0]), german.format(noun[1], verb[1]))
        for english, german in frames
        for noun in NOUNS
        for verb in VERBS
    ]


@pytest.fixture
def packages(make_wheel, catalogue):
    first, _ = make_wheel("first", {"a/locale/de/LC_MESSAGES/a.po": catalogue(entries(FRAMES[:2]))})
    second, _ = make_wheel(
        "second",
        {"b/locale/de/LC_MESSAGES/b.mo": catalogue(entries(FRAMES[1:]), compiled=True)},
        "License: UNKNOWN\nClassifier: License :: OSI Approved :: BSD License",
    )
    return [first, second]


@pytest.fixture
def options(tmp_path):
    return types.SimpleNamespace(
        output=tmp_path / "out",
        cache=tmp_path / "cache",
        folder=tmp_path / "wheels",
        offline=True,
        allow_missing=False,
    )


def build(packages, options, **changed):
    return build_corpus(packages, **{**vars(options), **changed})


def snapshot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_outputs_are_parallel_complete_and_accounted_for(packages, options):
    manifest = build(packages, options)
    total = 0
    for split in ("train", "valid", "test"):
        columns = [
            (options.output / f"{split}.{extension}").read_text(encoding="utf-8").splitlines()
            for extension in ("en", "de", "source")
        ]
        assert len({len(column) for column in columns}) == 1
        assert len(columns[0]) == manifest["splits"][split]["pairs"] > 0
        assert set(columns[2]) <= {"first", "second"}
        assert set(zip(columns[0], columns[1])) <= set(entries(FRAMES))
        total += len(columns[0])
    assert total == len(entries(FRAMES))
    sources = json.loads((options.output / "SOURCES.json").read_text(encoding="utf-8"))
    assert [(source["name"], source["licence"]) for source in sources] == [
        ("first", "MIT"),
        ("second", "BSD License"),
    ]
    assert sum(source["pairs"] for source in sources) == total
    assert [source["sha256"] for source in sources] == [package.sha256 for package in packages]
    for name, expected in manifest["files"].items():
        assert hashlib.sha256((options.output / name).read_bytes()).hexdigest() == expected


def test_a_second_run_reads_no_wheel_and_writes_nothing(packages, options, monkeypatch):
    assert build(packages, options)["built"] is True
    before = snapshot(options.output)
    monkeypatch.setattr(build_module, "obtain", lambda *_: pytest.fail("a wheel was asked for"))
    monkeypatch.setattr(build_module, "write_json", lambda *_: pytest.fail("a file was written"))
    assert build(packages, options)["built"] is False
    assert snapshot(options.output) == before


@pytest.mark.parametrize("damage", ["grow", "truncate", "remove"])
@pytest.mark.parametrize("name", ["train.de", "test.source", "SOURCES.json", "manifest.json", "valid.en"])
def test_a_damaged_output_is_rebuilt_to_the_same_bytes(packages, options, name, damage):
    build(packages, options)
    before = snapshot(options.output)
    path = options.output / name
    data = path.read_bytes()
    if damage == "remove" and name != "manifest.json":  # without it the folder is somebody else's: see below
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "truncate" else data + b"x")
    assert build(packages, options)["built"] is True
    assert snapshot(options.output) == before


def test_two_folders_get_the_same_bytes(packages, options, tmp_path):
    build(packages, options)
    build(packages, options, output=tmp_path / "again")
    assert snapshot(options.output) == snapshot(tmp_path / "again")


def test_an_interrupted_build_goes_on_and_ends_the_same(packages, options, tmp_path, monkeypatch):
    build(packages, options, output=tmp_path / "whole")

    def stop_after_one(line):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build_module.log, "info", stop_after_one)
        build(packages, options)
    assert not (options.output / "train.en").exists()
    build(packages, options)
    assert snapshot(options.output) == snapshot(tmp_path / "whole")


def test_an_update_that_cannot_be_built_leaves_the_old_corpus(packages, options):
    build(packages[:1], options)
    before = snapshot(options.output)
    (options.folder / packages[1].file).unlink()
    with pytest.raises(Unavailable):
        build(packages, options)
    assert snapshot(options.output) == before


def test_a_changed_package_list_makes_the_build_stale(packages, options):
    build(packages, options)
    manifest = build(packages[:1], options)
    assert manifest["built"] is True
    assert set(manifest["pairs"]) == {"first"}


def test_a_missing_package_is_named_and_can_be_allowed(packages, options, caplog):
    (options.folder / packages[1].file).unlink()
    with pytest.raises(Unavailable, match=r"second-1\.0"):
        build(packages, options)
    with caplog.at_level("INFO", "moa_fairseq.corpus"):
        manifest = build(packages, options, allow_missing=True)
    assert manifest["missing"] == ["second"]
    assert any("second" in line and "left out" in line for line in caplog.messages)
    assert manifest["splits"]["train"]["pairs"] > 0


def test_a_corpus_with_missing_packages_is_completed_later(packages, options):
    wheel = options.folder / packages[1].file
    data = wheel.read_bytes()
    wheel.unlink()
    build(packages, options, allow_missing=True)
    wheel.write_bytes(data)
    manifest = build(packages, options)
    assert manifest["built"] is True
    assert manifest["missing"] == []


def test_without_any_package_there_is_no_corpus(packages, options, tmp_path):
    with pytest.raises(UserError, match="Not one of the packages"):
        build(packages, options, folder=tmp_path, allow_missing=True)


def test_somebody_elses_corpus_is_not_overwritten(packages, options):
    options.output.mkdir()
    (options.output / "train.en").write_text("mine\n")
    with pytest.raises(UserError, match=r"train\.en.*--output"):
        build(packages, options)
    assert snapshot(options.output) == {(options.output / "train.en").relative_to(options.output): b"mine\n"}
    with pytest.raises(UserError, match="is a file"):
        build(packages, options, output=options.output / "train.en")
