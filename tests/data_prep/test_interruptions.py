"""Ctrl-C, a full disk or a crash at any point: the next run goes on, and ends with the very same files."""

import errno
import os

import pytest

from moa_fairseq.data_prep import archives, bpe, monolingual, resumable_files, stage_folder, text_stages
from moa_fairseq.data_prep.catalogue import datasets
from moa_fairseq.data_prep.prepare import Preparation
from moa_fairseq.errors import UserError

# (what is interrupted, its name, at which calls)
POINTS = [
    (archives, "atomic_write", (1, 2)),
    (text_stages.Chain, "apply", (1, 35, 77, 113, 117, 120, 140, 200, 232)),
    (text_stages, "_write", (1, 64, 111)),
    (resumable_files, "write_json", (1, 2, 3, 9, 12)),
    (bpe, "get_vocabulary", (1,)),
    (bpe, "learn_bpe", (1,)),
    (stage_folder, "_replace_folder", (1, 4, 6, 7, 8)),
    (stage_folder, "checksum", (2, 6, 14)),
]
READING = ("checksum",)  # no disk fills up there


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(text_stages, "CHUNK", 7)
    monkeypatch.setattr(text_stages, "COMMIT_EVERY", 3)


@pytest.fixture
def preparation(tables, preprocess, tmp_path, small_steps):
    tables()
    dataset = datasets()["wmt14_en_de"]
    settings = {"recipe": dataset.name, "source": "en", "target": "de", "bpe": 15, "lowercase": False}
    settings.update(joined_dictionary=True, flags={})

    def make(archives, name, binarise=preprocess):
        downloads = tmp_path / name / "downloads"
        folders = (archives, tmp_path / name, binarise, downloads)
        return Preparation(settings, ["train", "valid", "test"], *folders, workers=1)

    return make


def bomb(monkeypatch, place, name, when, problem):
    """Let the `when`-th call of place.name raise; returns the list of calls."""
    real, calls = getattr(place, name), []

    def wrapped(*arguments, **options):
        calls.append(name)
        if len(calls) == when:
            raise problem
        return real(*arguments, **options)

    monkeypatch.setattr(place, name, wrapped)
    return calls


@pytest.fixture
def undisturbed(preparation, miniature, made, tmp_path):
    archive_folder = miniature("wmt14_en_de")
    preparation(archive_folder, "calm").run()
    return archive_folder, made.tree(tmp_path / "calm")


@pytest.mark.parametrize(
    "problem", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], ids=["ctrl-c", "full"]
)
def test_translation(undisturbed, preparation, made, monkeypatch, tmp_path, problem):
    archive_folder, expected = undisturbed
    for place, name, moments in POINTS:
        for when in () if name in READING and isinstance(problem, OSError) else moments:
            folder = f"{name}{when}"
            with monkeypatch.context() as patch:
                calls = bomb(patch, place, name, when, problem)
                with pytest.raises((KeyboardInterrupt, UserError)) as raised:
                    preparation(archive_folder, folder).run()
                assert len(calls) >= when
            if isinstance(problem, OSError):
                assert "disk is full" in str(raised.value), (name, when)
            preparation(archive_folder, folder).run()
            assert made.tree(tmp_path / folder) == expected, (name, when)


def test_in_fairseq_preprocess(undisturbed, preparation, made, tmp_path):
    archive_folder, expected = undisturbed

    def interrupted(values):
        with open(values["destdir"] + "/dict.en.txt", "w") as stream:
            stream.write("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preparation(archive_folder, "late", interrupted).run()
    preparation(archive_folder, "late").run()
    assert made.tree(tmp_path / "late") == expected


def test_what_was_committed_is_not_done_again(undisturbed, preparation, monkeypatch):
    archive_folder, _ = undisturbed
    with monkeypatch.context() as patch:
        bomb(patch, text_stages.Chain, "apply", 100, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            preparation(archive_folder, "half").run()
    calls = bomb(monkeypatch, text_stages.Chain, "apply", -1, None)
    preparation(archive_folder, "half").run()
    # 113 + 5 + 5 pairs to tokenise and 110 + 5 + 5 to segment; 4 commits of 3 x 7 pairs were made before
    assert len(calls) == 123 + 120 - 84


def test_other_settings_do_not_go_on_from_unfinished_work(
    undisturbed, preparation, made, monkeypatch, tmp_path
):
    archive_folder, expected = undisturbed
    with monkeypatch.context() as patch:
        bomb(patch, text_stages.Chain, "apply", 100, KeyboardInterrupt())
        job = preparation(archive_folder, "other")
        job.settings["lowercase"] = True
        with pytest.raises(KeyboardInterrupt):
            job.run()
    job.settings["lowercase"] = False
    job.run()
    assert made.tree(tmp_path / "other") == expected


@pytest.mark.parametrize(
    ("name", "place", "function"),
    [
        ("wikitext103_sp8k", monolingual, "atomic_write"),
        ("wikitext103_sp8k", stage_folder, "_replace_folder"),
        ("wikitext103_word", monolingual, "_write"),
        ("enwik8", stage_folder, "_replace_folder"),
    ],
)
def test_language_modeling(tables, miniature, preprocess, made, monkeypatch, tmp_path, name, place, function):
    tables()
    archive_folder = miniature(name)

    def run(folder):
        folders = (archive_folder, tmp_path / folder, preprocess, tmp_path / folder / "downloads")
        Preparation({"recipe": name}, [], *folders, offline=True, workers=1).run()

    run("calm")
    for when in (1, 2):
        with monkeypatch.context() as patch:
            bomb(patch, place, function, when, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                run(f"{when}")
        run(f"{when}")
        assert made.tree(tmp_path / f"{when}") == made.tree(tmp_path / "calm")
