"""What --data must hold, and which of its files are read."""

from __future__ import annotations

import itertools
import logging
import re
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from moa_fairseq.data_prep.binarised import DICTIONARY, is_binarised
from moa_fairseq.data_prep.catalogue import SIDES, Dataset, Part, datasets
from moa_fairseq.data_prep.parallel_text import PiecePair, find_file
from moa_fairseq.errors import UserError

LOOK_AT, SHOWN = 1000, 3
_SEGMENTED = re.compile(r"[^\s@]@@ \S")
# split → the parts of the source language and those of the target language, side by side
Parts = Dict[str, List[List[Part]]]
log = logging.getLogger(__name__)


def require_source(settings: Mapping[str, Any], source: Optional[Path]) -> Optional[Path]:
    """The --data folder; None for a data set that is downloaded; or a UserError that says what to bring.

    A folder in which no file of the data set lies is refused: whoever names one wants it to be used.
    """
    dataset = datasets().get(settings["recipe"])
    if dataset is not None and dataset.downloadable:
        if source is not None and not has_text(source, dataset):
            _check_known(dataset, settings, source)
    elif source is None:
        bring = dataset.bring.format(**settings) if dataset else "Give --data the folder made by it."
        raise UserError(
            f"--data is missing: data recipe {settings['recipe']!r} starts from your files. {bring}"
        )
    return source


def _check_known(dataset: Dataset, settings: Mapping[str, Any], source: Path) -> None:
    if not source.is_dir():
        raise UserError(f"--data {source} is not a folder.")
    if is_binarised(source) or (source / DICTIONARY).is_file():
        return
    if dataset.generated:
        raise UserError(
            f"--data {source} is no binarised {dataset.name}: name the folder `binarised` in that which "
            f"moa-fairseq prepare {dataset.name} made, or leave --data away, so that it is made."
        )
    languages = [settings[side] for side in ("source", "target") if settings.get(side)]
    parts = dataset.parts(languages)
    archives = [part.archive for part in parts if part.archive]
    known = {
        "archives": archives,
        "texts": [name for part in parts for name in (part.members or (part.file,))],
        "your own tokenised text": [f"train.{language}" for language in languages] if archives else [],
    }
    if not any(find_file(source, name) for names in known.values() for name in names):
        looked = "; ".join(
            f"{what}: {', '.join(dict.fromkeys(Path(name).name for name in names))}"
            for what, names in known.items()
            if names
        )
        raise UserError(
            f"--data {source} holds no file of {dataset.name}. Looked for ({looked}), plain or .gz. Name the "
            "folder that has some of them (what it lacks is downloaded), or leave --data away, so that all "
            "are downloaded."
        )


def has_text(source: Path, dataset: Dataset) -> bool:
    """True for a .zip, and for a folder that holds a text of a data set of running text, or a part of one."""
    names = [stem.format(split=split) for stem in dataset.stems for split in dataset.splits]
    return bool(names) and (source.is_file() or any(find_file(source, name) for name in names))


def find_text(source: Path, dataset: Dataset, required: Sequence[str], unpacked: Path) -> Dict[str, Path]:
    """The text file of each split: all of one kind, the first kind of which all `required` are there.

    source: a folder or a .zip, whose files stand for those that it is unpacked to in the folder `unpacked`.
    Splits that are not required are taken where they exist. Raises UserError that says what is missing and
    what to bring.
    """
    kinds = [{split: [stem.format(split=split)] for split in dataset.splits} for stem in dataset.stems]
    if source.is_file() and zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            members = {Path(name).name for name in archive.namelist()}
        found = _files_in(
            source,
            lambda name: unpacked / name if name in members else None,
            kinds,
            required,
            dataset.bring,
        )
    else:
        found = files_in_folder(source, kinds, required, dataset.bring)
    return {split: path for split, (path,) in found.items()}


def split_parts(
    dataset: Dataset, settings: Mapping[str, Any], at_hand: Optional[Path], required: Sequence[str]
) -> Parts:
    """The parts of each split for the settings' pair of languages.

    A data set of text files that lies in the user's folder must lie there whole: of splits that are
    not `required` those are taken whose files are both there. Raises UserError for languages
    that the data set does not have, and one that lists all files that are missing.
    """
    languages = (settings["source"], settings["target"])
    strange = [language for language in languages if dataset.languages and language not in dataset.languages]
    if strange:
        raise UserError(
            f"{dataset.name} has no language {', '.join(strange)} (data.source, data.target): choose two of "
            f"{', '.join(dataset.languages)}."
        )
    parts = {
        split: [[part.named(*names) for part in rows] for names in zip(languages, SIDES)]
        for split, rows in dataset.splits.items()
    }
    if at_hand is None or dataset.archives:
        return parts
    names = {
        split: [Path(part.file).name.removesuffix(".gz") for side in sides for part in side]
        for split, sides in parts.items()
    }
    if dataset.downloadable and not any(
        find_file(at_hand, name) for name in itertools.chain(*names.values())
    ):
        return parts  # a folder without any of the data: all of it is fetched
    found = files_in_folder(at_hand, [names], required, dataset.bring.format(**settings))
    return {split: parts[split] for split in found}


def files_in_folder(
    folder: Path, kinds: Sequence[Mapping[str, Sequence[str]]], required: Sequence[str], bring: str
) -> Dict[str, List[Path]]:
    """split → its files, of the first kind (split → names) that the folder has whole.

    Of splits that are not required a kind may lack all files. Raises UserError that says what is missing.
    """
    if not folder.is_dir():
        raise UserError(f"There is no data folder {folder}. {bring}")
    return _files_in(folder, lambda name: find_file(folder, name), kinds, required, bring)


def _files_in(
    source: Path,
    find: Callable[[str], Optional[Path]],
    kinds: Sequence[Mapping[str, Sequence[str]]],
    required: Sequence[str],
    bring: str,
) -> Dict[str, List[Path]]:
    missing: List[str] = []
    for kind in kinds:
        found: Dict[str, List[Path]] = {}
        absent: List[str] = []
        for split, names in kind.items():
            paths = {name: find(name) for name in names}
            found[split] = [path for path in paths.values() if path]
            if split in required or found[split]:
                absent += [f"{name}[.gz]" for name, path in paths.items() if not path]
        if not absent:
            return {split: paths for split, paths in found.items() if paths}
        missing = missing or absent
    raise UserError(f"The data folder {source} lacks {', '.join(missing)}. {bring}")


def look_at(files: Sequence[PiecePair], languages: Sequence[str], segmenting: bool) -> None:
    """Show the first pairs of the training text, so that people see whether they belong together.

    segmenting: BPE is to be applied. Raises UserError for text that was segmented before, judged by the first
    LOOK_AT lines of each plain file.
    """
    for number, pair in enumerate(files):
        heads = [list(itertools.islice(piece.lines(mark_bad=True), LOOK_AT)) for piece in pair]
        for lines in list(zip(*heads))[: SHOWN if not number else 0]:
            shown = (f"{language}: {line[:60].strip()}" for language, line in zip(languages, lines))
            log.info("  %s", " | ".join(shown))
        for piece, first in zip(pair, heads):
            marked = sum(bool(_SEGMENTED.search(line)) for line in first)
            if segmenting and 20 * marked > len(first):
                raise UserError(
                    f"{piece.path} is segmented already: {marked:,} of its first {len(first):,} lines hold "
                    "words that end in @@ . To use it as it is: --set data.bpe=null. To segment it anew, "
                    "undo the old segmentation first: sed -r 's/(@@ )|(@@ ?$)//g'."
                )
