"""Before a download: its terms, its size and the free disk are said and checked, and kept in the manifest."""

import collections
import json

import pytest

from moa_fairseq.data_prep import download as downloading
from moa_fairseq.data_prep import obtain
from moa_fairseq.data_prep.catalogue import datasets, public_files
from moa_fairseq.data_prep.obtain import Store, before_download, human
from moa_fairseq.data_prep.prepare import Preparation
from moa_fairseq.errors import UserError

Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture
def fetched(monkeypatch, miniature, said):
    """fetched(name): downloads come from the miniature; returns what was said before each."""

    def serve(name):
        archives, moments = miniature(name), []

        def copy(source, folder, pauses):
            moments.append(list(said))
            target = folder / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((archives / target.name).read_bytes())
            return target

        monkeypatch.setattr(downloading, "download", copy)
        return moments

    return serve


def prepare(name, tmp_path, preprocess):
    Preparation({"recipe": name}, [], None, tmp_path / "out", preprocess, workers=1).run()
    return json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))


def test_terms_and_sizes_come_first_and_stay_in_the_manifest(tables, fetched, tmp_path, preprocess, said):
    tables(pins={"enwik8.zip": {"about": 36445475}})
    moments = fetched("enwik8")
    manifest = prepare("enwik8", tmp_path, preprocess)
    first, second = moments[0][:2]
    assert first.startswith("enwik8: terms of use: GNU Free Documentation License")
    assert "to download: 1 file, about 36 MB, into" in second and "about 1.0 GB of disk" in second
    assert manifest["licence"] == datasets()["enwik8"].licence
    assert manifest["download_bytes"] == 36445475
    said.clear()
    prepare("enwik8", tmp_path, preprocess)
    assert not any("terms of use" in line or "to download" in line for line in said)  # nothing is fetched


def test_a_full_disk_is_noticed_before_the_download(tables, fetched, tmp_path, preprocess, monkeypatch):
    tables(pins={"enwik8.zip": {"about": 36445475}})
    moments = fetched("enwik8")
    monkeypatch.setattr(obtain.shutil, "disk_usage", lambda path: Usage(10**9, 0, 500_000_000))
    with pytest.raises(UserError, match=r"about (1\.0 GB|1000 MB) more.*MOA_FAIRSEQ_IGNORE_DISK=1"):
        prepare("enwik8", tmp_path, preprocess)
    assert not moments
    monkeypatch.setenv(obtain.OVERRIDE, "1")
    prepare("enwik8", tmp_path, preprocess)
    assert len(moments) == 1


def test_what_is_there_already_needs_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(obtain.shutil, "disk_usage", lambda path: Usage(10**9, 0, 300_000_000))
    dataset = datasets()["enwik8"]
    arguments = (dataset, tmp_path / "out", tmp_path / "downloads", dataset.files())
    with pytest.raises(UserError, match="disk"):
        before_download(*arguments)
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / "half", "wb") as stream:
        stream.truncate(800_000_000)
    before_download(*arguments)


@pytest.mark.parametrize("name", ["wmt14_en_de", "multi30k"])
def test_sizes_of_a_pair_are_those_of_its_languages(name):
    dataset = datasets()[name]
    size = sum(file.bytes for file in dataset.files(("en", "de")))
    assert human(size) == {"wmt14_en_de": "1.8 GB", "multi30k": "1.4 MB"}[name]
    assert all(file.bytes for file in public_files().values())


def test_the_archive_that_is_gone_says_what_to_do_instead(tables, tmp_path, monkeypatch):
    gone = public_files()["wmt16_en_de.tar.gz"]
    assert gone.md5 == "874ab6bbfe9c21ec987ed1b9347f95ec" and "2021" in gone.remedy
    tables(pins={"wmt16_en_de.tar.gz": {"remedy": gone.remedy, "md5": gone.md5}})
    monkeypatch.setattr(downloading, "PAUSES", ())
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    part = datasets()["wmt14_en_de_vaswani"].parts(("en", "de"))[0]
    for offline in (False, True):
        with pytest.raises(UserError) as error:
            Store(None, tmp_path / "downloads", offline).pieces([part])
        for word in ("since 2021", gone.md5, "--flavour vaswani_rebuilt", "--from"):
            assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "file", "md5"),
    [
        ("wmt14_en_de_vaswani", "wmt16_en_de.tar.gz", "874ab6bbfe9c21ec987ed1b9347f95ec"),
        ("wmt14_en_de", "wmt17/dev.tgz", "9b1aa63c1cf49dccdd20b962fe313989"),
    ],
)
def test_an_archive_that_a_user_has_is_checked_by_its_published_md5(
    tables, miniature, tmp_path, name, file, md5
):
    assert public_files()[file].md5 == md5
    tables(pins={file.rpartition("/")[2]: {"md5": md5}})
    part = next(part for part in datasets()[name].parts(("en", "de")) if part.archive == file)
    with pytest.raises(UserError, match=rf"md5 .* instead of {md5}"):
        Store(miniature(name), tmp_path / "downloads", True).pieces([part])
