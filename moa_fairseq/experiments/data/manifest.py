"""manifest.json: the sources, settings and results of a prepared data set, with checksums."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moa_fairseq.experiments.data.catalogue import Dataset
from moa_fairseq.experiments.data.parallel_text import TextFile
from moa_fairseq.experiments.data.unknown import Symbols
from moa_fairseq.experiments.make import made_by_of, read_step_records
from moa_fairseq.experiments.records.json_files import MAPPING, Values, check_kinds, read_json
from moa_fairseq.experiments.records.provenance import combined
from moa_fairseq.experiments.tables import Column, Table, terminal_width
from moa_fairseq.files import checksum

MANIFEST = "manifest.json"
STAGES = ("model", "text", "tokens", "bpe", "pieces", "binarised")


def manifest_of(
    root: Path,
    settings: Mapping[str, Any],
    sources: Mapping[str, Any],
    texts: Mapping[str, Sequence[TextFile]],
    dataset: Dataset,
    counts: Mapping[str, Symbols],
) -> Values:
    """The content of manifest.json for the stages of a preparation.

    It has no time and no path outside `root`, so that two preparations of the same data have equal
    manifests.

    Args:
        root: the folder with the stages and their state.json.
        settings: the recipe's data section.
        sources: name of a file → its urls or origin, bytes and sha256.
        texts: split → the files that were read.
        dataset: the data set; its terms of use, published numbers of lines and checksums are copied.
        counts: split, or split.language → the numbers of its binarised symbols.
    """
    records = read_step_records(root)
    records.pop("manifest", None)  # the earlier manifest, which is replaced
    stages = {name: records[name]["facts"] for name in STAGES if name in records}
    sessions: list[Values] = []
    outputs = {}
    for record in records.values():
        sessions += made_by_of(record)
        for file, size in sorted(record.get("files", {}).items()):
            outputs[file] = {"bytes": size, "sha256": checksum(root / file)}
    return {
        "settings": dict(settings, summary=dataset.summary),
        "dataset": dataset.name,  # not always the requested one: for the user's own text
        "steps": {split: dataset.treatment(split, settings) for split in sorted(texts)},
        "licence": dataset.licence,
        "sources": dict(sorted(sources.items())),
        "texts": {split: [file.path.name for file in files] for split, files in texts.items()},
        "stages": stages,
        "lines": _numbers_of_lines(stages, dataset),
        "symbols": symbols_of(counts),
        "outputs": outputs,
        "published": _published_sums(root, settings, dataset),
        # recorded when each stage was made, but not by earlier versions
        "tools": combined([session.get("tools") or {} for session in sessions]),
    }


def _numbers_of_lines(stages: Mapping[str, Any], dataset: Dataset) -> Values:
    """Split → its number of lines after the last stage that counts them, and the published number."""
    numbers = {}
    for name in ("text", "tokens", "bpe", "pieces"):
        for split, fact in stages.get(name, {}).items():
            expected = dataset.expected.get(split)
            numbers[split] = {"found": fact["lines"], "expected": expected}
    return dict(sorted(numbers.items()))


def symbols_of(counts: Mapping[str, Symbols]) -> Values:
    """Split, or split.language → numbers of symbols and of <unk>, share of <unk>, longest line."""
    return {name: count._asdict() | {"share": count.share} for name, count in counts.items()}


def _published_sums(root: Path, settings: Mapping[str, Any], dataset: Dataset) -> Values:
    """Segmented file → its md5 and the published md5; {} for a text that was made with other settings."""
    published = dataset.published
    pair = {settings.get("source"), settings.get("target")}
    if not published or set(published["languages"]) != pair:
        return {}
    if settings.get("codes") or settings["bpe"] != published["merges"]:
        return {}
    sums = {}
    for name, md5 in published["md5"].items():
        path = root / "bpe" / name
        if path.is_file():
            sums[f"bpe/{name}"] = {"md5": checksum(path, "md5"), "published": md5}
    return sums


def read_manifest(folder: Path, remedy: str = "Prepare the data again.") -> Values:
    """The content of a folder's manifest.json; {} if there is none.

    Args:
        folder: the folder of prepared data.
        remedy: the last sentence of the error.

    Raises:
        UserError: if it is malformed.
    """
    try:
        manifest = read_json(folder / MANIFEST, remedy)
    except FileNotFoundError:
        return {}
    check_kinds(manifest, {"outputs": MAPPING, "splits": MAPPING}, str(folder / MANIFEST), remedy)
    return dict(manifest)


def summary(manifest: Mapping[str, Any], root: Path) -> list[str]:
    """The manifest for people: lines per split next to the published numbers, dropped lines, file locations.

    Args:
        manifest: see `manifest_of`.
        root: the manifest's folder.

    Returns:
        Lines of text.
    """
    lines = [*_line_table(manifest), *unknown_table(manifest), *_dropped_pairs(manifest["stages"])]
    sums = manifest["published"]
    changed = [name for name, file in sums.items() if file["md5"] != file["published"]]
    if changed:
        lines.append(
            f"! {', '.join(changed)}: differs from the published text (by md5; manifest.json has both)."
        )
    elif sums:
        lines.append(f"{', '.join(sums)}: equal to the published text, byte for byte (md5)")
    counts = manifest["lines"].items()
    unequal = [split for split, count in counts if count["expected"] not in (None, count["found"])]
    if unequal:
        lines.append(
            f"! {', '.join(unequal)}: the number of lines differs from the published one (see above)."
        )
    return [*lines, f"{root}/manifest.json has sources, checksums, counts and versions."]


def _line_table(manifest: Mapping[str, Any]) -> list[str]:
    """A table of the number of lines of each split, the published number and the longest line, in lines."""
    texts = manifest["stages"].get("text", {})
    rows = []
    for split, count in manifest["lines"].items():
        longest = texts.get(split, {}).get("longest")
        row = {"split": split, "lines": count["found"], "longest": longest}
        if count["expected"] == count["found"]:
            row["published"] = "the same"
        elif count["expected"] is not None:
            row["published"] = f"{count['expected']:,}!"
        rows.append(row)
    columns = [
        Column("split", "split"),
        Column("lines", "lines", ","),
        Column("published", "published"),
        Column("longest", "longest (bytes)", ","),
    ]
    return Table(columns, rows).text(terminal_width()).splitlines()


def unknown_table(manifest: Mapping[str, Any]) -> list[str]:
    """A table of the symbols, share of <unk> and longest sentence of each binarised split, in lines."""
    rows = []
    for split, counts in (manifest.get("symbols") or {}).items():
        rows.append({"split": split} | counts)
    columns = [
        Column("split", "binarised"),
        Column("symbols", "symbols", ","),
        Column("share", "<unk>", ".2%"),
    ]
    # Else the table of lines has the longest line
    if not any("longest" in fact for fact in manifest.get("stages", {}).get("text", {}).values()):
        columns.append(Column("longest", "longest (symbols)", ","))
    return Table(columns, rows).text(terminal_width()).splitlines()


def _dropped_pairs(stages: Mapping[str, Any]) -> list[str]:
    """A line for each stage and split that dropped pairs, with the reasons."""
    lines = []
    for stage, facts in stages.items():
        for split, fact in facts.items():
            # Other facts are numbers, such as that of the pieces
            if isinstance(fact, dict) and fact.get("dropped"):
                drops = fact["dropped"].items()
                reasons = [f"{count:,} dropped: {reason}" for reason, count in drops]
                lines.append(f"{stage} of {split}: {fact['read']:,} read, {', '.join(reasons)}")
    return lines
