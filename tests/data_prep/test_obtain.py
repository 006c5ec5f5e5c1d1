"""Archives and files at hand: taken, refused with the remedy, opened safely."""

import gzip
import io
import tarfile
import zipfile

import pytest

from moa_fairseq.data_prep.archives import DamagedArchive, extract
from moa_fairseq.data_prep.catalogue import Part, public_files
from moa_fairseq.data_prep.obtain import GIVEN, Store
from moa_fairseq.errors import UserError

PART = Part(archive="iwslt14/de-en.tgz", members=("de-en/train.tags.de-en.de",), markup="wit3")


@pytest.fixture
def store(tables, tmp_path):
    tables()

    def make(at_hand=None, offline=True):
        return Store(at_hand, tmp_path / "downloads", offline)

    return make


def test_offline_without_the_file(store, tmp_path):
    with pytest.raises(UserError, match=r"de-en\.tgz is not in \S+downloads, and --offline.*--from"):
        store().pieces([PART])
    (tmp_path / "here").mkdir()
    with pytest.raises(UserError, match=r"not in \S+here and \S+downloads"):
        store(tmp_path / "here").pieces([PART])


def test_a_download_of_before_needs_no_network(store, miniature, tmp_path):
    (tmp_path / "downloads" / "iwslt14").mkdir(parents=True)
    (miniature("iwslt14_de_en") / "de-en.tgz").rename(tmp_path / "downloads" / "iwslt14" / "de-en.tgz")
    (piece,) = store().pieces([PART]).values()
    assert piece.markup == "wit3" and len(list(piece.lines())) == 63


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<!DOCTYPE html><html>Sign in</html>", "is a web page"),
        (b"", "is no gzip file"),
        (b"PK\x03\x04", "is no gzip file"),
    ],
)
def test_a_wrong_archive_at_hand_is_refused(store, tmp_path, content, words):
    (tmp_path / "de-en.tgz").write_bytes(content)
    with pytest.raises(UserError, match=rf"de-en\.tgz is not the file.*{words}.*Take it away"):
        store(tmp_path).pieces([PART])


def test_an_archive_of_another_size_may_be_unpacked_instead(tables, miniature, tmp_path):
    tables(pins={"de-en.tgz": {"size": 19_982_877}})
    folder = miniature("iwslt14_de_en")
    with pytest.raises(UserError, match=r"instead of 19,982,877.*unpacked files are taken"):
        Store(folder, tmp_path / "downloads", True).pieces([PART])
    with tarfile.open(folder / "de-en.tgz") as package:
        package.extractall(folder, filter="data")
    (piece,) = Store(folder, tmp_path / "downloads", True).pieces([PART]).values()
    assert piece.path == folder / PART.members[0]


def test_iwslts_archive_is_pinned():
    assert public_files()["iwslt14/de-en.tgz"].size == 19_982_877


def test_the_manifest_claims_no_address_for_what_was_brought(store, miniature, tmp_path):
    brought = store(miniature("iwslt14_de_en"))
    brought.pieces([PART])
    (origin,) = brought.origins.values()
    assert origin["origin"] == GIVEN and "urls" not in origin and origin["sha256"]
    (tmp_path / "downloads" / "iwslt14").mkdir(parents=True)
    (brought.at_hand / "de-en.tgz").rename(tmp_path / "downloads" / "iwslt14" / "de-en.tgz")
    fetched = store()
    fetched.pieces([PART])
    (origin,) = fetched.origins.values()
    assert origin["urls"] and "origin" not in origin


def test_a_wrong_checksum_at_hand_is_refused(tables, miniature, tmp_path):
    tables(pins={"de-en.tgz": {"sha256": "0" * 64}})
    with pytest.raises(UserError, match=r"sha256 .* instead of 0000"):
        Store(miniature("iwslt14_de_en"), tmp_path / "downloads", True).pieces([PART])


@pytest.mark.parametrize("keep", [200, -30, -9])
def test_a_truncated_archive_at_hand_is_refused(store, miniature, keep):
    folder = miniature("iwslt14_de_en")
    archive = folder / "de-en.tgz"
    with tarfile.open(archive) as package:
        last = package.getnames()[-1]
    archive.write_bytes(archive.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"de-en\.tgz is cut off or damaged.*Replace it"):
        store(folder).pieces([Part(archive=PART.archive, members=(last + ".absent", last))])


def test_a_damaged_download_is_thrown_away(store, miniature, tmp_path):
    archive = tmp_path / "downloads" / "iwslt14" / "de-en.tgz"
    archive.parent.mkdir(parents=True)
    archive.write_bytes((miniature("iwslt14_de_en") / "de-en.tgz").read_bytes()[:300])
    with pytest.raises(UserError, match=r"cut off or damaged.*was removed: run the same command again"):
        store().pieces([PART])
    assert not archive.exists()


def test_another_archive_of_the_same_name(store, made, tmp_path):
    made.write_tar(tmp_path / "de-en.tgz", {"de-en/other": "x"})
    with pytest.raises(UserError, match=r"does not contain de-en/train\.tags\.de-en\.de"):
        store(tmp_path).pieces([PART])


def test_only_what_was_asked_for_leaves_an_archive(made, tmp_path):
    members = {"../evil": "x", "/absolute": "x", "a/../../evil": "x", "./wanted/./file": "yes", "other": "x"}
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


@pytest.mark.parametrize(("names", "text"), [(("first", "second"), "1"), (("none", "second"), "2")])
def test_the_first_of_several_names_is_taken(store, made, tmp_path, names, text):
    made.write_tar(tmp_path / "de-en.tgz", {"second": "2", "first": "1"})
    (piece,) = store(tmp_path).pieces([Part(archive=PART.archive, members=names)]).values()
    assert list(piece.lines()) == [text]


def test_names_are_found_in_whatever_folder(made, tmp_path):
    made.write_zip(tmp_path / "x.zip", {"a/b/train.txt": "yes", "c/train.txt": "no", "../valid.txt": "x"})
    found = extract(tmp_path / "x.zip", ["train.txt"], tmp_path / "out", lambda path: path.rpartition("/")[2])
    assert found == {"train.txt": 3} and (tmp_path / "out" / "train.txt").read_text() == "yes"


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
