"""Which files a data set reads for a pair of languages, and cheap checks before hours are spent on them."""

from __future__ import annotations

import collections
import gzip
import itertools
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from moa_fairseq.data_prep.catalogue import SIDES, Dataset, Part
from moa_fairseq.data_prep.parallel_text import PiecePair, damaged_gzip, unequal
from moa_fairseq.data_prep.stage_folder import FileMemory
from moa_fairseq.errors import UserError

Pair = Tuple[str, str]
LOOK_AT = 1000
_SEGMENTED = re.compile(r"[^\s@]@@ \S")
# Words that are common in one of these languages and rare in the others.
COMMON_WORDS = {
    "en": ("the", "of", "and", "to", "is", "that", "with", "for", "are"),
    "de": ("der", "und", "das", "ist", "nicht", "ein", "mit", "auf", "von"),
    "fr": ("le", "les", "et", "est", "une", "dans", "que", "pour", "du"),
}
# split → the parts of the source language and those of the target language, side by side
Parts = Dict[str, Tuple[List[Part], List[Part]]]


def split_parts(
    dataset: Dataset,
    languages: Pair,
    at_hand: Optional[Path],
    required: Sequence[str],
    settings: Mapping[str, Any],
) -> Parts:
    """The parts of each split for a pair of languages.

    A data set of text files that lies in the user's folder must lie there whole: of splits that are
    not `required` those are taken whose files are both there. Raises UserError for languages or
    subsets that the data set does not have, and one that lists all files that are missing.
    """
    _check_languages(dataset, languages)
    parts = {
        split: tuple(
            [part.named(language, side) for part in rows] for language, side in zip(languages, SIDES)
        )
        for split, rows in dataset.splits.items()
    }
    unknown = [split for split in required if split not in dataset.subsets]
    if unknown:
        raise UserError(
            f"The data has no subset {', '.join(unknown)} (generate.subsets); {dataset.name} has "
            f"{', '.join(dataset.subsets)}."
        )
    if at_hand is None or any(part.archive for rows in dataset.splits.values() for part in rows):
        return parts
    return _whole_at_hand(parts, at_hand, required, hint(dataset, settings), dataset.downloadable)


def hint(dataset: Dataset, settings: Mapping[str, Any]) -> str:
    """What the user's folder should hold."""
    return dataset.bring.format(**settings)


def brought_tokens(dataset: Dataset, folder: Path, languages: Pair) -> bool:
    """True when a folder given for a data set of archives holds tokenised text of the user's own instead."""
    archives = any(part.archive for rows in dataset.splits.values() for part in rows)
    return archives and all(_find(folder, f"train.{language}") for language in languages)


def check_lengths(texts: Dict[str, List[PiecePair]], memory: FileMemory) -> None:
    """Raise UserError for two plain files of different length, before the first line is processed."""
    for files in texts.values():
        for source, target in files:
            if (source.markup, target.markup) != ("plain", "plain"):
                continue
            counts = [memory.fact(piece.path, "lines", count_lines) for piece in (source, target)]
            if counts[0] > counts[1]:
                raise UserError(unequal(source.path, counts[0], target.path, counts[1]))
            if counts[1] > counts[0]:
                raise UserError(unequal(target.path, counts[1], source.path, counts[0]))


def check_looks(files: Sequence[PiecePair], languages: Pair, segmenting: bool) -> None:
    """Raise UserError for training text that was segmented before, or whose two languages are swapped.

    segmenting: BPE is to be applied. Judged by the first LOOK_AT lines of each pair of plain files.
    """
    for pair in files:
        if any(piece.markup != "plain" for piece in pair):
            continue
        heads = [list(itertools.islice(piece.lines(mark_bad=True), LOOK_AT)) for piece in pair]
        for piece, lines in zip(pair, heads):
            marked = sum(bool(_SEGMENTED.search(line)) for line in lines)
            if segmenting and 20 * marked > len(lines):
                raise UserError(
                    f"{piece.path} is segmented already: {marked:,} of its first {len(lines):,} lines hold "
                    "words that end in @@ . To use it as it is: --set data.bpe=none. To segment it anew, "
                    "undo the old segmentation first: sed -r 's/(@@ )|(@@ ?$)//g'."
                )
        if _other_way_round(heads, languages):
            names = [piece.path for piece in pair]
            raise UserError(
                f"{names[0]} reads like {languages[1]} and {names[1]} like {languages[0]}: the languages are "
                "swapped. Exchange the names of the two files."
            )


def _other_way_round(heads: Sequence[Sequence[str]], languages: Pair) -> bool:
    """True when each side has plenty of the other language's commonest words and hardly any of its own."""
    if languages[0] == languages[1] or not all(language in COMMON_WORDS for language in languages):
        return False
    for lines, own, other in zip(heads, languages, reversed(languages)):
        words = collections.Counter(word for line in lines for word in line.lower().split())
        hits = {name: sum(words[word] for word in COMMON_WORDS[name]) for name in (own, other)}
        if hits[other] < 20 or hits[other] < 5 * hits[own]:
            return False
    return True


def count_lines(path: Path) -> int:
    """Lines of a file, gzip when named .gz; a last line without an end counts. Raises UserError."""
    count, last = 0, b"\n"
    with damaged_gzip(path), gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def texts_for_manifest(texts: Dict[str, List[PiecePair]], memory: FileMemory) -> Dict[str, List]:
    """split → name, sha256 and (of plain text) lines of each file that was read."""
    return {
        split: [
            {
                "file": piece.path.name,
                "sha256": memory.sha256(piece.path),
                "lines": memory.fact(piece.path, "lines", count_lines) if piece.markup == "plain" else None,
            }
            for pair in files
            for piece in pair
        ]
        for split, files in texts.items()
    }


def _check_languages(dataset: Dataset, languages: Pair) -> None:
    strange = [language for language in languages if dataset.languages and language not in dataset.languages]
    if strange:
        raise UserError(
            f"{dataset.name} has no language {', '.join(strange)} (data.source, data.target): choose two of "
            f"{', '.join(dataset.languages)}."
        )


def _whole_at_hand(
    parts: Parts, folder: Path, required: Sequence[str], bring: str, downloadable: bool
) -> Parts:
    if not folder.is_dir():
        raise UserError(f"There is no data folder {folder}. {bring}")
    found, missing = {}, []
    for split, sides in parts.items():
        names = [Path(part.file).name.removesuffix(".gz") for side in sides for part in side]
        there = [bool(_find(folder, name)) for name in names]
        if all(there):
            found[split] = sides
        elif split in required or any(there):
            missing += [f"{name}[.gz]" for name, present in zip(names, there) if not present]
    if missing and not found and downloadable:
        return parts  # a folder without any of the data: all of it is fetched
    if missing:
        state = "is empty" if not any(folder.iterdir()) else f"lacks {', '.join(missing)}"
        raise UserError(f"The data folder {folder} {state}. {bring}")
    return found


def _find(folder: Path, name: str) -> Optional[Path]:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
