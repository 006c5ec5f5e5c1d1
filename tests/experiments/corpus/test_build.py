import hashlib
import json

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.corpus import build as build_module
from moa_fairseq.experiments.corpus.build import build as build_corpus
from moa_fairseq.experiments.data.download import Unavailable

NOUNS = {"file": "Datei", "page": "Seite", "group": "Gruppe", "list": "Liste", "door": "Tür"}
VERBS = {
    "saved": "gespeichert",
    "deleted": "gelöscht",
    "opened": "geöffnet",
    "found": "gefunden",
}
FRAMES = [
    ("The {} was not {}.", "Die {} wurde nicht {}."),
    ("The {} has been {}.", "Die {} wurde {}."),
    ("This {} will be {}.", "Diese {} wird {} werden."),
]


def entries(frames):
    return [
        (english.format(noun, verb), german.format(NOUNS[noun], VERBS[verb]))
        for english, german in frames
        for noun in NOUNS
        for verb in VERBS
    ]


@pytest.fixture
def packages(make_wheel, catalogue):
    first, _ = make_wheel(
        "first", {"a/locale/de/LC_MESSAGES/a.po": catalogue(entries(FRAMES[:2]))}
    )
    second, _ = make_wheel(
        "second",
        {"b/locale/de/LC_MESSAGES/b.mo": catalogue(entries(FRAMES[1:]), compiled=True)},
        "License: UNKNOWN\nClassifier: License :: OSI Approved :: BSD License",
    )
    return [first, second]


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def build(tmp_path, output):
    """build(packages, …) → the manifest, from the wheels that lie in tmp_path/wheels."""

    def run(packages, output=output, folder=tmp_path / "wheels", allow_missing=False):
        return build_corpus(packages, output, tmp_path / "cache", folder, True, allow_missing)

    return run


def snapshot(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_outputs_are_parallel_complete_and_accounted_for(packages, build, output):
    manifest = build(packages)
    total = 0
    for split in ("train", "valid", "test"):
        columns = [
            (output / f"{split}.{side}").read_text("utf-8").splitlines()
            for side in ("en", "de", "source")
        ]
        assert (
            len(columns[0])
            == len(columns[1])
            == len(columns[2])
            == manifest["splits"][split]["pairs"]
            > 0
        )
        assert set(columns[2]) <= {"first", "second"}
        assert set(zip(*columns[:2])) <= set(entries(FRAMES))
        total += len(columns[0])
    assert total == len(entries(FRAMES))
    sources = json.loads((output / "SOURCES.json").read_text("utf-8"))
    described = [(source["name"], source["licence"], source["sha256"]) for source in sources]
    assert described == [
        ("first", "MIT", packages[0].sha256),
        ("second", "BSD License", packages[1].sha256),
    ]
    assert sum(source["pairs"] for source in sources) == total
    for name, expected in manifest["files"].items():
        assert hashlib.sha256((output / name).read_bytes()).hexdigest() == expected


def test_a_second_run_reads_no_wheel_and_writes_nothing(
    packages, build, output, monkeypatch, tmp_path
):
    assert build(packages)["built"] is True
    before = snapshot(output)
    build(packages, output=tmp_path / "again")
    assert snapshot(tmp_path / "again") == before
    monkeypatch.setattr(build_module, "obtain", lambda *_: pytest.fail("a wheel was asked for"))
    monkeypatch.setattr(
        build_module, "write_json", lambda *_: pytest.fail("a file was written")
    )
    assert build(packages)["built"] is False
    assert snapshot(output) == before


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train.de", "grow"),
        ("test.source", "remove"),
        ("SOURCES.json", "truncate"),
        ("manifest.json", "truncate"),  # without it the folder is somebody else's: see below
    ],
)
def test_a_damaged_output_is_rebuilt_to_the_same_bytes(packages, build, output, name, damage):
    build(packages)
    before = snapshot(output)
    path = output / name
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "truncate" else data + b"x")
    assert build(packages)["built"] is True
    assert snapshot(output) == before


def test_an_interrupted_build_goes_on_and_ends_the_same(
    packages, build, output, tmp_path, monkeypatch
):
    build(packages, output=tmp_path / "whole")

    def stop_after_one(line):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build_module.log, "info", stop_after_one)
        build(packages)
    assert not (output / "train.en").exists()
    build(packages)
    assert snapshot(output) == snapshot(tmp_path / "whole")


def test_a_build_that_was_killed_while_it_wrote_knows_its_own_folder(
    packages, build, output, tmp_path, monkeypatch
):
    """A corpus without a manifest is somebody else's: see below."""
    build(packages, output=tmp_path / "whole")
    write = build_module.atomic_write

    def stop(path):
        if path.name == "valid.de":
            raise KeyboardInterrupt
        return write(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build_module, "atomic_write", stop)
        build(packages)
    assert (output / "train.en").exists()
    assert build(packages)["built"] is True
    assert snapshot(output) == snapshot(tmp_path / "whole")


def test_a_changed_package_list_makes_the_build_stale(packages, build):
    build(packages)
    manifest = build(packages[:1])
    assert manifest["built"] is True and set(manifest["pairs"]) == {"first"}


def test_a_missing_package_is_named_can_be_allowed_and_comes_later(
    packages, build, output, tmp_path, caplog
):
    build(packages[:1])
    before = snapshot(output)
    wheel = tmp_path / "wheels" / packages[1].file
    aside = wheel.rename(tmp_path / "aside")
    with pytest.raises(Unavailable, match=r"second-1\.0"):
        build(packages)
    assert snapshot(output) == before  # the old corpus stays
    with caplog.at_level("INFO", "moa_fairseq.experiments.corpus"):
        manifest = build(packages, allow_missing=True)
    assert manifest["missing"] == ["second"] and manifest["splits"]["train"]["pairs"] > 0
    assert any("second" in line and "left out" in line for line in caplog.messages)
    aside.rename(wheel)
    manifest = build(packages)
    assert manifest["built"] is True and manifest["missing"] == []
    with pytest.raises(UserError, match="packages could"):
        build(packages, output=tmp_path / "other", folder=tmp_path, allow_missing=True)


def test_somebody_elses_corpus_is_not_overwritten(packages, build, output):
    output.mkdir()
    (output / "train.en").write_text("mine\n")
    with pytest.raises(UserError, match=r"train\.en.*--output"):
        build(packages)
    assert list(snapshot(output).values()) == [b"mine\n"]
    with pytest.raises(UserError, match="is a file"):
        build(packages, output=output / "train.en")
