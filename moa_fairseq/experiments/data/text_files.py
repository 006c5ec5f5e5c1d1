"""The files that a model needs to read and write text: dictionaries, merges or pieces, line functions.

A prepared folder lists these files in its manifest.json. A run keeps copies in RUN/text, which is
a small prepared folder, so that data that is prepared again, edited or lost is never taken for the run's.
"""

import fnmatch
import inspect
import itertools
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import DICTIONARY, INPUT, LABEL
from moa_fairseq.experiments.data.catalogue import SENTENCEPIECE, datasets
from moa_fairseq.experiments.data.gpt2_files import ENCODER, VOCAB
from moa_fairseq.experiments.data.job import CODES
from moa_fairseq.experiments.data.manifest import MANIFEST, read_manifest
from moa_fairseq.experiments.data.prepare import content_digest, size_digest
from moa_fairseq.experiments.make import STATE, read_step_records
from moa_fairseq.experiments.records.json_files import MAPPING, TEXT, check_kinds, write_json
from moa_fairseq.files import checksum, refuse_irregular, refuse_link_out
from moa_fairseq.text.steps import STEPS, Step

RUN_COPY = "text"  # the copy in a run folder
BINARISED = "binarised"
_DICTIONARIES = (
    DICTIONARY,
    "dict.*.txt",
    f"{INPUT}/{DICTIONARY}",
    f"{LABEL}/{DICTIONARY}",
    ENCODER,
    VOCAB,
)
# Merges or pieces, next to the binarised folder
_BESIDE = (f"bpe/{CODES}", CODES, "model/sentencepiece*.model")
log = logging.getLogger(__name__)


def text_files(data: Path) -> dict[str, Path]:
    """The files of a binarised folder for reading and writing text.

    Merges and pieces are included if a manifest.json is next to the folder.

    Args:
        data: the binarised folder.

    Returns:
        The name in a prepared folder, such as "binarised/dict.en.txt" → the file.

    Raises:
        UserError: for anything but an ordinary file, because reading a pipe would hang.
    """
    dictionaries = sorted(itertools.chain.from_iterable(map(data.glob, _DICTIONARIES)))
    files = {f"{BINARISED}/{path.relative_to(data)}": path for path in dictionaries}
    if (data.parent / MANIFEST).is_file():
        for name in _BESIDE:
            for path in sorted(data.parent.glob(name)):
                files[str(path.relative_to(data.parent))] = path
    for path in files.values():
        refuse_irregular(path, "File")
    return files


class TextRules(NamedTuple):
    """How the raw text of a data set became symbols.

    Args:
        kind: the kind of the data set.
        encoder: as in `Dataset`, or SENTENCEPIECE for a translation by pieces.
        merges: whether there are merges.
        source, target: the languages of a translation.
        steps: the line functions of a translation, with their options.
    """

    kind: str
    encoder: str
    merges: bool
    source: str = ""
    target: str = ""
    steps: tuple[Step, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The entry "rules" of a manifest, without languages for text in one language."""
        names = self._fields if self.target else ("kind", "encoder", "merges")
        return {name: getattr(self, name) for name in names}


def rules_of(
    manifest: Mapping[str, Any], remedy: str = "Prepare the data again."
) -> TextRules | None:
    """The rules by which the text of a manifest was turned into symbols.

    Args:
        manifest: the manifest of a prepared folder, or of a run's copy.
        remedy: the last sentence of the error.

    Returns:
        The rules; None if the manifest does not give them.

    Raises:
        UserError: if the manifest is malformed.
    """
    location = f"The {MANIFEST} of the data"
    check_kinds(
        manifest, {"rules": MAPPING, "settings": MAPPING, "dataset": TEXT}, location, remedy
    )
    rules = manifest.get("rules")
    if rules is None:
        return _rules_of_settings(manifest, location, remedy)
    if not rules:
        return None
    kinds = dict.fromkeys(("kind", "encoder", "source", "target"), TEXT)
    check_kinds(rules, kinds, f"{location}: rules", remedy)
    steps = rules.get("steps", [])
    if not isinstance(steps, list) or not all(map(_is_step, steps)):
        raise UserError(
            f"{location}: the rules' steps are not line functions with options. {remedy}"
        )
    return TextRules(
        kind=rules.get("kind") or "",
        encoder=rules.get("encoder") or "",
        merges=bool(rules.get("merges")),
        source=rules.get("source") or "",
        target=rules.get("target") or "",
        steps=tuple((name, options) for name, options in steps),
    )


def _rules_of_settings(manifest: Mapping[str, Any], location: str, remedy: str) -> TextRules | None:
    """The rules that follow from a data set and the settings of its preparation."""
    settings = manifest.get("settings") or {}
    kinds = dict.fromkeys(("recipe", "source", "target"), TEXT)
    check_kinds(settings, kinds, f"{location}: settings", remedy)
    dataset = datasets().get(manifest.get("dataset") or settings.get("recipe") or "")
    if not dataset:
        return None
    by_pieces = settings.get("segmentation") == SENTENCEPIECE
    rules = TextRules(
        kind=dataset.kind,
        encoder=SENTENCEPIECE if by_pieces else dataset.encoder,
        merges=bool(settings.get("bpe") or settings.get("codes")) and not by_pieces,
    )
    source = settings.get("source")
    target = settings.get("target")
    if source is None or target is None:
        return rules
    steps = dataset.steps_for("test", source, settings)
    return rules._replace(source=source, target=target, steps=steps)


def _is_step(step: Any) -> bool:
    """Whether a value of JSON is a line function with options that it takes."""
    try:
        name, options = step
        inspect.signature(STEPS[name]).bind("", **options)
        return all(isinstance(value, (str, bool)) for value in options.values())
    # A stranger's file may have any value
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def save_run_copy(data: Path, run_folder: Path, fingerprint: str, new: Path) -> None:
    """Write a run's copy of its data's text files, with their checksums and the rules.

    Args:
        data: the binarised folder.
        run_folder: the run folder; its state.json has the fingerprint of the data of an earlier training.
        fingerprint: the fingerprint of `data`.
        new: the folder of the copy.

    Raises:
        UserError: for files that changed since the data was prepared, and if the run was trained on other
            data.
    """
    inputs = read_step_records(run_folder).get("train", {}).get("inputs", {})
    if inputs.get("data", fingerprint) != fingerprint:
        raise UserError(
            f"{run_folder} was trained on other data than {data} has now. Restore that data, use another "
            "--save-dir, or --restart to move the old run aside and start over."
        )
    unlisted_text_files(data)  # raises for changed files
    copy_text_files(data, new)


def copy_text_files(data: Path, new: Path) -> None:
    """Copy a binarised folder's text files and their entries in its manifest; nothing else is copied.

    Args:
        data: the binarised folder.
        new: the folder of the copy.

    Raises:
        UserError: for a link that leads out of the folder, and anything that is not an ordinary file.
    """
    outputs = {}
    refuse_link_out(data.parent / MANIFEST, data.parent)
    for name, path in text_files(data).items():
        refuse_link_out(path, data, data.parent)
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, new / name)
        outputs[name] = {"bytes": (new / name).stat().st_size, "sha256": checksum(new / name)}
    manifest = read_manifest(data.parent)
    settings = manifest.get("settings") or {"recipe": BINARISED}
    rules = rules_of(manifest)
    rules_json = rules.as_json() if rules else {}
    write_json(new / MANIFEST, {"settings": settings, "rules": rules_json, "outputs": outputs})


def run_copy_of(checkpoint: Path) -> Path | None:
    """The binarised folder of a run's copy of its data's text files.

    Args:
        checkpoint: a checkpoint in the run folder.

    Returns:
        The folder; None if the checkpoint is in no run folder with a copy.

    Raises:
        UserError: if the copy was changed, or a file was added to it.
    """
    run = _run_of(checkpoint, f"{RUN_COPY}/{MANIFEST}")  # an exported model has no state.json
    if run is None:
        return None
    copy = run / RUN_COPY
    remedy = f"Delete {copy}: the run's data is then used to read text, if it is unchanged."
    if unlisted := unlisted_text_files(copy / BINARISED, remedy):
        raise UserError(
            f"{copy / unlisted[0]} is not listed in {MANIFEST} of the run's text. {remedy}"
        )
    rules_of(read_manifest(copy, remedy), remedy)
    return copy / BINARISED


def unverified_text_files(checkpoint: Path, data: Path, named: bool) -> list[str]:
    """Compare data's text files with those that a model's training recorded.

    Args:
        checkpoint: the model's checkpoint, in its run folder or elsewhere.
        data: the binarised folder.
        named: True if the user named this data: then a model of an older version, whose run has no copy of
            its text files, may use it.

    Returns:
        The names, in a prepared folder, of the files that could not be checked.

    Raises:
        UserError: for files that differ from those of the training, and files that were changed.
    """
    run_copy = run_copy_of(checkpoint)
    unlisted = unlisted_text_files(data)
    if run_copy:
        _refuse_other_files(run_copy, data)
        return []
    # A run of an older version has no copy of its text files
    run = _run_of(checkpoint, STATE)
    fingerprint = _recorded_fingerprint(run) if run else None
    if fingerprint and _has_fingerprint(data, fingerprint):
        return unlisted
    if fingerprint and not named:
        raise UserError(
            f"{data} was prepared again since {run} was trained on it. Restore it, or give data with the "
            f"same dictionaries and merges, such as --data {data}."
        )
    return sorted(text_files(data))


def _refuse_other_files(run_copy: Path, data: Path) -> None:
    """Raise UserError if data's text files differ from a run's copy. The data may lack merges or pieces."""
    files = text_files(data)
    for name, path in text_files(run_copy).items():
        is_required = name in files or name.startswith(BINARISED)
        if is_required and (name not in files or checksum(files[name]) != checksum(path)):
            raise UserError(
                f"{data} has another {name} than {path}, of training, or none. Leave --data out to use the "
                f"run's own {path}, or give the data of its training."
            )


def _recorded_fingerprint(run: Path) -> str | None:
    """The fingerprint of the data that a run was trained on."""
    facts = read_step_records(run).get("prepare", {}).get("facts")
    return facts.get("fingerprint") if isinstance(facts, dict) else None


def _has_fingerprint(data: Path, fingerprint: str) -> bool:
    """Whether data has this fingerprint: by its records, or its content if it was binarised elsewhere."""
    records = read_step_records(data.parent)
    record = records.get(BINARISED) or records.get(f"{BINARISED}-{LABEL}")
    if record:
        return bool(record.get("fingerprint") == fingerprint)
    return fingerprint in (content_digest(data), size_digest(data))


def warn_of_unverified(names: list[str], checkpoint: Path, data: Path) -> None:
    """Warn of the files that `unverified_text_files` returns, if any."""
    if names:
        log.warning(
            f"{checkpoint}: {', '.join(names)} of {data} could not be checked: the model has no record of "
            "its text files, so only the numbers of symbols were compared"
        )


def unlisted_text_files(
    data: Path,
    remedy: str = "Put the original back, or delete this file and prepare the data again.",
) -> list[str]:
    """Check a binarised folder's text files by the manifest.json next to it, and name those it does not list.

    Args:
        data: the binarised folder.
        remedy: the last sentence of the error.

    Returns:
        The names of the unlisted files.

    Raises:
        UserError: for a file that is missing or differs from the list.
    """
    files = text_files(data)
    listed = _listed_checksums(data, remedy)
    manifest = data.parent / MANIFEST
    for name, expected in listed.items():
        path = files.get(name)
        if path is None:
            raise UserError(f"{data.parent / name} is missing, but {manifest} lists it. {remedy}")
        if checksum(path) != expected:
            raise UserError(
                f"{path} was changed: it is not the file that {manifest} lists. {remedy}"
            )
    return sorted(files.keys() - listed)


def _listed_checksums(data: Path, remedy: str) -> dict[str, str]:
    """Name → checksum of the text files in the manifest.json next to a binarised folder."""
    patterns = list(_BESIDE)
    # The manifest lists the dictionaries of the folder BINARISED, and of no other folder next to it
    if data.name == BINARISED:
        patterns += [f"{BINARISED}/{name}" for name in _DICTIONARIES]
    outputs = read_manifest(data.parent, remedy).get("outputs") or {}
    checksums = {}
    for name, entry in outputs.items():
        is_text = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        if is_text and isinstance(entry, dict) and isinstance(entry.get("sha256"), str):
            checksums[name] = entry["sha256"]
    return checksums


def _run_of(checkpoint: Path, file: str) -> Path | None:
    """The folder of a checkpoint, or the folder above, if `file` is in it; None if it is in neither."""
    for folder in checkpoint.resolve().parents[:2]:
        if (folder / file).is_file():
            return folder
    return None
