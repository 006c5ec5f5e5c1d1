"""Files at hand and fetched ones: announced, taken, refused with the remedy, opened safely."""

import contextlib
import gzip
import hashlib
import io
import os
import shutil
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import download as downloading
from moa_fairseq.experiments.data import obtain
from moa_fairseq.experiments.data.archives import DamagedArchive, extract
from moa_fairseq.experiments.data.catalogue import Part, datasets, public_files
from moa_fairseq.experiments.data.manifest import read_manifest
from moa_fairseq.experiments.data.obtain import GIVEN, Store, before_download, format_bytes
from moa_fairseq.experiments.data.prepare import Preparation
from moa_fairseq.files import checksum

PART = Part(("de-en/train.tags.de-en.de",), "iwslt14/de-en.tgz", "wit3")


@pytest.fixture
def room(monkeypatch):
    """room(bytes): so much of every disk is free."""
    return lambda free: monkeypatch.setattr(
        obtain.shutil, "disk_usage", lambda path: SimpleNamespace(free=free)
    )


@pytest.fixture
def store(tables, tmp_path):
    """store(folder at hand, pins=…) → a Store that is offline, and the table that it reads."""

    def make(at_hand=None, **pins):
        tables(pins={"de-en.tgz": pins})
        return Store(at_hand, tmp_path / "downloads", offline=True)

    return make


@pytest.fixture
def downloaded(miniature, tmp_path):
    """IWSLT's archive among the downloads."""
    path = tmp_path / "downloads" / "iwslt14" / "de-en.tgz"
    path.parent.mkdir(parents=True)
    return Path(shutil.copyfile(miniature("iwslt14_de_en") / "de-en.tgz", path))


def test_offline_without_the_file(store, tmp_path):
    with pytest.raises(
        UserError, match=r"de-en\.tgz is not in \S+downloads, and --offline.*--from"
    ):
        store().fetch_texts([PART])
    (tmp_path / "here").mkdir()
    with pytest.raises(UserError, match=r"not in \S+here and \S+downloads"):
        store(tmp_path / "here").fetch_texts([PART])


def test_the_manifest_claims_no_address_for_what_was_brought(store, downloaded, miniature):
    for at_hand, said, unsaid in (
        (None, "urls", "origin"),
        (miniature("iwslt14_de_en"), "origin", "urls"),
    ):
        used = store(at_hand)
        (file,) = used.fetch_texts([PART]).values()
        assert file.markup == "wit3" and len(list(file.lines())) == 63
        (origin,) = used.origins.values()
        assert origin[said] and unsaid not in origin and origin["sha256"]
    assert origin["origin"] == GIVEN


@pytest.mark.parametrize(
    ("content", "pins", "words"),
    [
        (b"<!DOCTYPE html><html>Sign in</html>", {}, "is a web page"),
        (b"", {}, "is not a gzip file"),
        (b"PK\x03\x04", {}, "is not a gzip file"),
        (None, {"sha256": "0" * 64}, "sha256 .* instead of 0000"),
        (None, {"md5": "0" * 32}, "md5 .* instead of 0000"),
        (None, {"size": 19_982_877}, "instead of 19,982,877"),
    ],
)
def test_a_wrong_archive_at_hand_is_refused_and_may_be_unpacked(
    store, miniature, content, pins, words
):
    folder = miniature("iwslt14_de_en")
    with tarfile.open(folder / "de-en.tgz") as package:
        package.extractall(folder / "open", filter="data")
    if content is not None:
        (folder / "de-en.tgz").write_bytes(content)
    known = rf"de-en\.tgz is not the file.*{words}.*https?://\S+"
    with pytest.raises(UserError, match=known):
        store(folder, **pins).fetch_texts([PART])
    (file,) = store(folder / "open", **pins).fetch_texts([PART]).values()
    assert file.path == folder / "open" / PART.members[0]


@pytest.mark.parametrize("keep", [200, -30, -9])
def test_a_truncated_archive_is_refused_and_a_download_thrown_away(
    store, downloaded, miniature, keep
):
    folder = miniature("iwslt14_de_en")
    with tarfile.open(downloaded) as package:
        last = package.getnames()[-1]
    part = PART._replace(members=(last + ".absent", last))
    for archive, at_hand, remedy in (
        (folder / "de-en.tgz", folder, "Replace it"),
        (downloaded, None, "again"),
    ):
        archive.write_bytes(archive.read_bytes()[:keep])
        with pytest.raises(UserError, match=rf"de-en\.tgz is cut off or damaged.*{remedy}"):
            store(at_hand).fetch_texts([part])
    assert (folder / "de-en.tgz").exists() and not downloaded.exists()


@pytest.mark.parametrize(
    ("names", "text"),
    [(("first", "second"), "1"), (("none", "second"), "2"), (("none", "nobody"), None)],
)
def test_the_first_of_several_names_is_taken(store, made, tmp_path, names, text):
    made.write_tar(tmp_path / "de-en.tgz", {"second": "2", "first": "1"})
    part = Part(names, PART.archive)
    if text is None:
        with pytest.raises(UserError, match="does not contain none or nobody"):
            store(tmp_path).fetch_texts([part])
    else:
        assert list(store(tmp_path).fetch_texts([part])[part].lines()) == [text]


# --- archives -----------------------------------------------------------------------------------------------


def test_only_what_was_asked_for_leaves_an_archive(made, tmp_path):
    members = {
        "../evil": "x",
        "/absolute": "x",
        "a/../../evil": "x",
        "./wanted/./file": "yes",
        "other": "x",
    }
    made.write_tar(tmp_path / "in" / "x.tgz", members)
    made.write_zip(tmp_path / "in" / "x.zip", members)
    for name in ("x.tgz", "x.zip"):
        out = tmp_path / "out" / name
        assert extract(tmp_path / "in" / name, ["wanted/file"], out) == {"wanted/file": 3}
        assert [path.name for path in out.rglob("*")] == ["wanted", "file"]
    assert not list(tmp_path.rglob("evil"))
    with pytest.raises(ValueError, match="leave"):
        extract(tmp_path / "in" / "x.tgz", ["../evil"], tmp_path / "out")


def test_links_are_not_followed(tmp_path):
    (tmp_path / "secret").write_text("secret")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE):
            info = tarfile.TarInfo("wanted")
            info.type, info.linkname = kind, str(tmp_path / "secret")
            archive.addfile(info)
    assert extract(tmp_path / "x.tar", ["wanted"], tmp_path / "out") == {}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [512, 8192, 65536, 1 << 20])
def test_a_large_archive_is_unpacked_once(made, tmp_path, monkeypatch, size):
    """One pass, wherever members begin: going back would decompress gigabytes again."""
    made.write_tar(tmp_path / "x.tgz", {f"{number}": "x" * size for number in range(5)})
    rewound = []
    monkeypatch.setattr(gzip._GzipReader, "_rewind", lambda self: rewound.append(1))
    extract(tmp_path / "x.tgz", ["1", "3"], tmp_path / "out")
    assert not rewound


def test_a_zip_with_a_damaged_member(tmp_path):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("wanted", "text " * 1000)
    damaged = bytearray(data.getvalue())
    damaged[45:50] = b"\xff" * 5
    (tmp_path / "x.zip").write_bytes(bytes(damaged))
    with pytest.raises(DamagedArchive, match="cut off or damaged"):
        extract(tmp_path / "x.zip", ["wanted"], tmp_path / "out")
    assert not (tmp_path / "out" / "wanted").exists()


# --- before a download its terms, its size and the free disk ------------------------------------------------


@pytest.fixture
def enwik8(tables, miniature, preprocess, tmp_path, monkeypatch, said):
    """enwik8() prepares it from downloads → the manifest; .said: what was said before each download."""
    tables(pins={"enwik8.zip": {"about": 36445475}})
    archives = miniature("enwik8")

    def copy(source, folder, pauses):
        prepare.said.append(list(said))
        (folder / source.name).parent.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copyfile(archives / source.name, folder / source.name))

    def prepare():
        said.clear()
        Preparation(
            {"recipe": "enwik8"}, [], None, tmp_path / "out", preprocess, workers=1
        ).run()
        return read_manifest(tmp_path / "out")

    prepare.said = []
    monkeypatch.setattr(downloading, "download", copy)
    return prepare


def test_terms_and_sizes_come_first_and_stay_in_the_manifest(enwik8, said):
    manifest = enwik8()
    first, second = enwik8.said[0][:2]
    assert first.startswith("enwik8: terms of use: GNU Free Documentation License")
    assert (
        "to download: 1 file, about 36 MB, into" in second and "about 1.0 GB of disk" in second
    )
    assert manifest["licence"] == datasets()["enwik8"].licence
    enwik8()
    # Nothing is fetched
    assert not any("terms of use" in line or "to download" in line for line in said)


def test_a_full_disk_is_noticed_before_the_download(enwik8, room, monkeypatch):
    room(500_000_000)
    with pytest.raises(
        UserError, match=r"about (1\.0 GB|1000 MB) more.*MOA_FAIRSEQ_IGNORE_DISK=1"
    ):
        enwik8()
    assert not enwik8.said
    monkeypatch.setenv(obtain.OVERRIDE, "1")
    enwik8()
    assert len(enwik8.said) == 1


@pytest.mark.parametrize("name", [name for name in datasets() if datasets()[name].files()])
def test_every_data_set_can_say_what_a_download_needs(name, tmp_path, room):
    """Also those of three languages."""
    dataset = datasets()[name]
    room(2 * (int(dataset.disk * 1e9) + sum(file.bytes for file in dataset.files())))
    before_download(dataset, tmp_path / "out", tmp_path / "downloads", dataset.files())


def test_what_is_there_already_needs_no_room(tmp_path, room):
    room(300_000_000)
    dataset = datasets()["enwik8"]
    arguments = (dataset, tmp_path / "out", tmp_path / "downloads", dataset.files())
    with pytest.raises(UserError, match="disk"):
        before_download(*arguments)
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / "half", "wb") as stream:
        stream.truncate(800_000_000)
    before_download(*arguments)


def test_sizes_and_sums_that_were_published():
    for name, size in {"wmt14_en_de": "1.8 GB", "multi30k": "1.4 MB"}.items():
        assert (
            format_bytes(sum(file.bytes for file in datasets()[name].files(("en", "de"))))
            == size
        )
    assert all(file.bytes for file in public_files().values())


def test_the_archive_that_is_gone_says_what_to_do_instead(tables, tmp_path, monkeypatch):
    gone = public_files()["wmt16_en_de.tar.gz"]
    tables(pins={"wmt16_en_de.tar.gz": {"remedy": gone.remedy, "md5": gone.md5}})
    monkeypatch.setattr(downloading, "PAUSES", ())
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    part = datasets()["wmt14_en_de_vaswani"].parts(("en", "de"))["train"][0]
    for offline in (False, True):
        with pytest.raises(UserError) as error:
            Store(None, tmp_path / "downloads", offline).fetch_texts([part])
        for word in ("since 2021", gone.md5, "--flavour vaswani_rebuilt", "--from"):
            assert word in str(error.value)


def test_checksums_of_two_kinds_are_remembered_apart_and_a_changed_file_is_read(tmp_path):
    file = tmp_path / "x"
    memory = tmp_path / "memory.json"
    file.write_bytes(b"one")
    for _ in range(2):
        for kind in ("sha256", "md5"):
            assert (
                obtain.known_checksum(memory, file, kind)
                == hashlib.new(kind, b"one").hexdigest()
            )
    time = file.stat().st_mtime_ns
    file.write_bytes(b"two")
    os.utime(file, ns=(time + 1, time + 1))
    assert obtain.known_checksum(memory, file) == hashlib.sha256(b"two").hexdigest()


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    """As one that is still copied: what was read first is not its checksum."""
    file = tmp_path / "x"
    file.write_bytes(b"one")

    def read_and_written(path, algorithm):
        digest = checksum(path, algorithm)
        path.write_bytes(b"longer")
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(obtain, "checksum", read_and_written)
        obtain.known_checksum(tmp_path / "memory.json", file)
    found = obtain.known_checksum(tmp_path / "memory.json", file)
    assert found == hashlib.sha256(b"longer").hexdigest()


def test_two_folders_on_one_disk_need_room_for_both(tmp_path, room):
    """36 MB are fetched, and prepared the data takes 1.0 GB with them: each alone would fit."""
    dataset = datasets()["enwik8"]
    fetched = sum(file.bytes for file in dataset.files())
    whole = dataset.disk * 1e9
    arguments = (dataset, tmp_path / "out", tmp_path / "downloads", dataset.files())
    for free, fits in ((whole + 1e6, True), (whole - fetched / 2, False)):
        room(free)
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match="disk"):
            before_download(*arguments)
