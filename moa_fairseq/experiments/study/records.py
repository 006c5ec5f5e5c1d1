"""The records in a study's folder: records.jsonl, and outputs.tar.xz with outputs.sha256.

A record may also be a separate file, SYSTEM-seedN.json, and a translation one in outputs/. Such a file
replaces a packed one of the same name. `pack` moves them into the others.
"""

import contextlib
import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.archives import contents, pack
from moa_fairseq.experiments.records.json_files import (
    LIST,
    MAPPING,
    NUMBER,
    TEXT,
    append_json_line,
    check_appendable,
    check_kinds,
    read_json,
    read_json_lines,
)
from moa_fairseq.files import atomic_write, refuse_link_out

RECORDS = "records.jsonl"
ARCHIVE = "outputs.tar.xz"
CHECKSUMS = "outputs.sha256"
SINGLE_OUTPUTS = "outputs"
FINISHED = "finished"
DIVERGED = "diverged"
REMEDY = "Correct or remove that entry alone (the others stay valid), or restore the file with git checkout."
_SINGLE = re.compile(r".+-seed\d+\.json")
_KINDS = {"curve": LIST, "settings": MAPPING}
_KINDS |= dict.fromkeys(("seed", "parameters", "tokens_per_second", "unknown"), NUMBER)
_KINDS |= dict.fromkeys(
    ("study", "system", "end", "commit", "data", "hardware", "precision", "command"), TEXT
)
Content = dict[str, Any]  # the content of a record


class Record(NamedTuple):
    """The record of one run.

    Args:
        where: the file, with the line in a file of several records, for messages.
        content: the content of the record.
    """

    where: str
    content: Content


def records_of(folder: Path) -> dict[tuple[str, int], Record]:
    """Every record of a study.

    Args:
        folder: the folder of the study, such as results/studies/STUDY.

    Returns:
        (system, seed) → record. A separate file replaces a line of that run, and a later line an earlier one.

    Raises:
        UserError: for a damaged record.
    """
    # Read first, because `pack_study` removes a single file once its record is in the other file
    single = _single_records(folder)
    packed = []
    path = folder / RECORDS
    with contextlib.suppress(FileNotFoundError):
        for number, content in read_json_lines(path, REMEDY).items():
            packed.append(_checked(content, f"{path}, line {number}"))
    records = {}
    for record in (*packed, *single):
        records[record.content["system"], record.content["seed"]] = record
    return records


def append_record(folder: Path, content: Content) -> None:
    """Append a run's record to those of its study.

    Args:
        folder: the folder of the study.
        content: the record.

    Raises:
        UserError: if it cannot be written.
    """
    append_json_line(folder / RECORDS, content)


def check_records(folder: Path) -> None:
    """Check before a training that its record can be appended.

    Args:
        folder: the folder of the study.

    Raises:
        UserError: if it cannot be written.
    """
    check_appendable(folder / RECORDS)


def outputs_of(folder: Path) -> dict[str, bytes]:
    """Every translation of a study's runs.

    Args:
        folder: the folder of the study.

    Returns:
        RUN.SUBSET.txt → the bytes of the text, which has a line for each sentence.

    Raises:
        UserError: for a damaged archive.
    """
    # Read first, because `pack_study` removes a single file once its text is in the archive
    single = {}
    for path in _single_outputs(folder):
        with contextlib.suppress(FileNotFoundError):  # packed in the meantime
            single[path.name] = path.read_bytes()
    refuse_link_out(folder / ARCHIVE, folder)
    packed = {}
    if (folder / ARCHIVE).is_file():
        packed = contents(folder / ARCHIVE)
    return packed | single


def write_output(folder: Path, run: str, subset: str, lines: list[str]) -> None:
    """Write a run's translation of a test set as a separate file.

    Args:
        folder: the folder of the study.
        run: the name of the run.
        subset: the name of the test set.
        lines: the translations, in the order of the test set.

    Raises:
        UserError: if it cannot be written.
    """
    with atomic_write(folder / SINGLE_OUTPUTS / f"{run}.{subset}.txt") as stream:
        stream.writelines(f"{line}\n" for line in lines)


def pack_study(folder: Path) -> tuple[int, int]:
    """Move records and translations from separate files into records.jsonl and outputs.tar.xz.

    A file is removed only when its content is elsewhere on the disk, so after a kill a study can be packed
    again.

    Args:
        folder: the folder of the study.

    Returns:
        The numbers of packed records and translations.

    Raises:
        UserError: for a damaged record, and for a file that cannot be written.
    """
    single = _single_records(folder)
    outputs = _single_outputs(folder)
    texts = outputs_of(folder) if outputs else {}
    for record in sorted(single, key=lambda each: (each.content["seed"], each.content["system"])):
        append_record(folder, record.content)
        Path(record.where).unlink()
    if outputs:
        pack(folder / ARCHIVE, texts)
        with atomic_write(folder / CHECKSUMS) as stream:
            for name in sorted(texts):
                stream.write(f"{hashlib.sha256(texts[name]).hexdigest()}  {name}\n")
        for path in outputs:
            path.unlink()
        if not any((folder / SINGLE_OUTPUTS).iterdir()):
            (folder / SINGLE_OUTPUTS).rmdir()
    return len(single), len(outputs)


def _single_records(folder: Path) -> list[Record]:
    """The records in separate files."""
    records = []
    for path in sorted(folder.glob("*.json")):
        if not _SINGLE.fullmatch(path.name):
            continue
        refuse_link_out(path, folder)
        with contextlib.suppress(FileNotFoundError):  # packed in the meantime
            records.append(_checked(read_json(path, REMEDY), str(path)))
    return records


def _checked(content: Any, where: str) -> Record:
    """Check a record; a UserError names the line or file, and the key."""
    check_kinds(
        content, _KINDS, where, REMEDY, required=("study", "system", "seed", "end", "curve")
    )
    # They are null if the training ended before they were known
    if missing := sorted({"parameters", "tokens_per_second"} - content.keys()):
        raise UserError(f"{where} lacks {', '.join(missing)}. {REMEDY}")
    if content["end"] not in (FINISHED, DIVERGED):
        raise UserError(
            f"{where}: end is {content['end'][:80]!r}, and must be {FINISHED} or {DIVERGED}. {REMEDY}"
        )
    for row in content["curve"]:
        check_kinds(
            row, dict.fromkeys(("updates", "valid", "train"), NUMBER), f"{where}: curve", REMEDY
        )
    return Record(where, content)


def _single_outputs(folder: Path) -> list[Path]:
    """The translations in separate files."""
    files = sorted(filter(Path.is_file, (folder / SINGLE_OUTPUTS).glob("*.txt")))
    for path in files:
        refuse_link_out(path, folder)
    return files
