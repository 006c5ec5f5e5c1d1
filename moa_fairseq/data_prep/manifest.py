"""manifest.json: what a prepared data set was made from, how, and what came out, with checksums."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

import moa_fairseq
from moa_fairseq.data_prep.catalogue import Dataset
from moa_fairseq.data_prep.parallel_text import Piece
from moa_fairseq.data_prep.stage_folder import FileMemory, read_mark
from moa_fairseq.json_files import read_json, write_json

MANIFEST = "manifest.json"
TOOLS = (
    *("subword-nmt", "sacremoses", "sentencepiece", "regex", "torch", "numpy"),
    *("fairseq", "ve-fairseq"),
)
STAGES = ("model", "text", "tokens", "bpe", "binarised")


def write_manifest(
    root: Path,
    settings: Mapping[str, Any],
    sources: Mapping[str, Any],
    texts: Mapping[str, Sequence[Piece]],
    dataset: Dataset,
) -> Dict[str, Any]:
    """Write `root/manifest.json` about the stage folders below `root`; returns its content.

    settings: of the data section. sources: name → urls or origin, bytes, sha256. texts: split → the files
    that were read. dataset: with its terms of use, published numbers of lines and checksums. Holds no time
    and no path outside of `root`, so that two preparations of the same data have equal manifests.
    """
    memory = FileMemory(root / "files.json")
    stages = {name: read_mark(root / name) for name in STAGES}
    # after the last stage that counts them
    lines = {
        split: fact["lines"]
        for name in ("text", "tokens", "bpe")
        for split, fact in stages[name].get("facts", {}).items()
        if isinstance(fact, dict) and "lines" in fact
    }
    languages = [settings[side] for side in ("source", "target") if side in settings]
    manifest = {
        "settings": {**settings, "summary": dataset.summary},
        "licence": dataset.licence,
        "download_bytes": sum(file.bytes for file in dataset.files(languages)),
        "sources": dict(sorted(sources.items())),
        "texts": {
            split: [
                {
                    "file": piece.path.name,
                    "sha256": memory.checksum(piece.path),
                    "lines": memory.lines(piece),
                }
                for piece in pieces
            ]
            for split, pieces in texts.items()
        },
        "stages": {name: mark["facts"] for name, mark in stages.items() if mark},
        "lines": {
            split: {"found": lines[split], "expected": dataset.expected.get(split)} for split in sorted(lines)
        },
        "outputs": {
            f"{name}/{file}": {"bytes": size, "sha256": memory.checksum(root / name / file)}
            for name, mark in stages.items()
            for file, size in mark.get("files", {}).items()
        },
        "published": _published(root, settings, dataset, memory),
        "tools": tool_versions(),
    }
    write_json(root / MANIFEST, manifest)
    return manifest


def tool_versions() -> Dict[str, str]:
    """Versions of everything that shapes the result."""
    versions = {"python": platform.python_version(), "moa_fairseq": moa_fairseq.__version__}
    for tool in TOOLS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[tool] = metadata.version(tool)
    return versions


def _published(
    root: Path, settings: Mapping[str, Any], dataset: Dataset, memory: FileMemory
) -> Dict[str, Dict[str, str]]:
    """Segmented file → its md5 and that of the published one, where the settings are those of the latter."""
    published = dataset.published
    pair = {settings.get("source"), settings.get("target")}
    if not published or set(published.languages) != pair or settings.get("codes"):
        return {}
    if settings["bpe"] != published.merges:
        return {}
    return {
        f"bpe/{name}": {"md5": memory.checksum(root / "bpe" / name, "md5"), "published": md5}
        for name, md5 in published.md5.items()
        if (root / "bpe" / name).is_file()
    }


def read_manifest(folder: Path) -> Dict[str, Any]:
    """manifest.json of a folder, {} where there is none."""
    try:
        return read_json(folder / MANIFEST, "Prepare the data again.")
    except FileNotFoundError:
        return {}


def verdict(manifest: Mapping[str, Any]) -> List[str]:
    """Whether the segmented text is the published one, in a line or two; nothing where none is published."""
    compared = manifest["published"]
    different = [name for name, one in compared.items() if one["md5"] != one["published"]]
    if different:
        names = ", ".join(different)
        return [f"! {names}: not the published text (by md5); manifest.json has both checksums."]
    return [f"{', '.join(compared)}: equal to the published text, byte for byte (md5)"] if compared else []


def summary(manifest: Mapping[str, Any], root: Path) -> List[str]:
    """The manifest for people: lines per split beside the published numbers, drops, where things are."""
    out = [f"{'split':8s} {'lines':>12s}  published"]
    for split, count in manifest["lines"].items():
        expected = count["expected"]
        verdict = "" if expected is None else "the same" if expected == count["found"] else f"{expected:,}!"
        out.append(f"{split:8s} {count['found']:12,d}  {verdict}".rstrip())
    for stage, facts in manifest["stages"].items():
        for split, fact in facts.items():
            if isinstance(fact, dict):
                drops = [f"{n:,} dropped: {why}" for why, n in fact.get("dropped", {}).items()]
                out += [f"{stage} of {split}: {fact['read']:,} read, {', '.join(drops)}"] if drops else []
    different = [split for split, n in manifest["lines"].items() if n["expected"] not in (None, n["found"])]
    if different:
        out.append(f"! {', '.join(different)}: another number of lines than published; see the drops above.")
    out.append(f"{root}/manifest.json has sources, checksums, counts and versions.")
    return out
