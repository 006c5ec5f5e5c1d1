"""Running text in three splits: what the files of each data recipe are called, and finding them."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path, PurePosixPath
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

from moa_fairseq.data_prep.archives import archive_errors
from moa_fairseq.data_prep.stage_folder import build_folder, fingerprint_of
from moa_fairseq.errors import UserError

SPLITS = ("train", "valid", "test")


class TextSource(NamedTuple):
    """What one data recipe knows about its text.

    stems: names of a split's file, `{split}` left open, best first. words: split → white-space words, with
    one end of line each, that the published text has. bring: what --data must hold, for error messages.
    dataset: the data set of datasets.yaml that it can be downloaded as.
    """

    stems: Sequence[str]
    words: Mapping[str, int]
    bring: str
    dataset: str = ""


_WIKI = ("wiki.{split}.raw", "wiki.{split}.tokens")
TEXT_SOURCES: Dict[str, TextSource] = {
    "wikitext103_gpt2bpe": TextSource(
        (*_WIKI, "wikitext-103.{split}.txt", "{split}"),
        {"train": 103_227_021, "valid": 217_646, "test": 245_569},
        "Give --data the unpacked folder (or the .zip) of WikiText-103: wiki.train.raw, wiki.valid.raw and "
        "wiki.test.raw, or the .tokens files, plain or .gz.",
        "wikitext103_raw",
    ),
    "wikitext2_gpt2bpe": TextSource(
        (*_WIKI, "wikitext-2.{split}.txt"),
        {"train": 2_088_628, "valid": 217_646, "test": 245_569},
        "Give --data the unpacked folder (or the .zip) of WikiText-2: wiki.train.raw, wiki.valid.raw and "
        "wiki.test.raw, or the .tokens files, plain or .gz.",
        "wikitext2_raw",
    ),
    "embedded_gpt2bpe": TextSource(
        ("{split}.en",),
        {},
        "Give --data a folder with train.en, valid.en and test.en, or leave --data away: `moa-fairseq "
        "corpus` then builds the embedded corpus, whose English side is used.",
    ),
    "text_gpt2bpe": TextSource(
        ("{split}.txt", "{split}.raw", "{split}"),
        {},
        "Give --data a folder (or a .zip) with train.txt, valid.txt and test.txt: text, plain or .gz.",
    ),
}


def has_text(source: Path, recipe: str) -> bool:
    """True for a .zip, and for a folder that holds a text of the recipe or a part of one."""
    names = [stem.format(split=split) for stem in TEXT_SOURCES[recipe].stems for split in SPLITS]
    return source.is_file() or any(_find(source, name) for name in names)


def find_text(
    source: Path, recipe: str, subsets: Sequence[str], unpacked: Path, say: Callable
) -> Dict[str, Path]:
    """The text file of each split: all of one kind, the first kind of which all `subsets` are there.

    source: a folder or a .zip (its files are unpacked into the folder `unpacked`). Splits that are not
    required are taken where they exist. Raises UserError that says what is missing and what to bring.
    """
    about = TEXT_SOURCES[recipe]
    unknown = [subset for subset in subsets if subset not in SPLITS]
    if unknown:
        raise UserError(
            f"The data has no subset {', '.join(unknown)} (score.subsets); it has {', '.join(SPLITS)}."
        )
    if source.is_file() and zipfile.is_zipfile(source):
        source = _unpack(source, about, unpacked, say)
    elif not source.is_dir():
        raise UserError(f"There is no data folder {source}. {about.bring}")
    for stem in about.stems:
        files = {split: _find(source, stem.format(split=split)) for split in SPLITS}
        if all(files[subset] for subset in subsets):
            return {split: path for split, path in files.items() if path}
    first = ", ".join(about.stems[0].format(split=subset) for subset in subsets)
    raise UserError(f"The data folder {source} lacks {first}. {about.bring}")


def _find(folder: Path, name: str) -> Optional[Path]:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _unpack(archive: Path, about: TextSource, unpacked: Path, say: Callable) -> Path:
    """The archive's text files, whatever folder in it they stand in, written to `unpacked` by their names."""
    wanted = {stem.format(split=split) for stem in about.stems for split in SPLITS}
    stat = archive.stat()

    def build(new: Path) -> List[str]:
        with zipfile.ZipFile(archive) as members:
            for member in members.infolist():
                name = PurePosixPath(member.filename).name
                if name in wanted and not (new / name).exists():
                    with members.open(member) as content, open(new / name, "wb") as stream:
                        shutil.copyfileobj(content, stream, 1 << 20)
        return sorted(path.name for path in new.iterdir())

    with archive_errors(archive):
        build_folder(unpacked, fingerprint_of(archive.name, stat.st_size, stat.st_mtime_ns), build, say)
    return unpacked
