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
from moa_fairseq.files import checksum
from moa_fairseq.json_files import read_json
from moa_fairseq.running.make import marks

MANIFEST = "manifest.json"
TOOLS = (
    *("subword-nmt", "sacremoses", "sentencepiece", "regex", "torch", "numpy"),
    *("fairseq", "ve-fairseq"),
)
STAGES = ("model", "text", "tokens", "bpe", "binarised")


def manifest_of(
    root: Path,
    settings: Mapping[str, Any],
    sources: Mapping[str, Any],
    texts: Mapping[str, Sequence[Piece]],
    dataset: Dataset,
) -> Dict[str, Any]:
    """What manifest.json says about the stages in `root`.

    settings: of the data section. sources: name → urls or origin, bytes, sha256. texts: split → the files
    that were read. dataset: with its terms of use, published numbers of lines and checksums. Holds no time
    and no path outside of `root`, so that two preparations of the same data have equal manifests.
    """
    known = marks(root)
    stages = {name: known[name] for name in STAGES if name in known}
    # after the last stage that counts them
    lines = {
        split: fact["lines"]
        for name in ("text", "tokens", "bpe")
        for split, fact in stages.get(name, {}).get("facts", {}).items()
        if isinstance(fact, dict) and "lines" in fact
    }
    languages = [settings[side] for side in ("source", "target") if side in settings]
    return {
        "settings": {**settings, "summary": dataset.summary},
        "licence": dataset.licence,
        "download_bytes": sum(file.bytes for file in dataset.files(languages)),
        "sources": dict(sorted(sources.items())),
        "texts": {split: [piece.path.name for piece in pieces] for split, pieces in texts.items()},
        "stages": {name: mark["facts"] for name, mark in stages.items()},
        "lines": {
            split: {"found": lines[split], "expected": dataset.expected.get(split)} for split in sorted(lines)
        },
        "outputs": {
            file: {"bytes": size, "sha256": checksum(root / file)}
            for mark in known.values()
            for file, size in sorted(mark.get("files", {}).items())
        },
        "published": _published(root, settings, dataset),
        "tools": tool_versions(),
    }


def tool_versions() -> Dict[str, str]:
    """Versions of everything that shapes the result."""
    versions = {"python": platform.python_version(), "moa_fairseq": moa_fairseq.__version__}
    for tool in TOOLS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[tool] = metadata.version(tool)
    return versions


def _published(root: Path, settings: Mapping[str, Any], dataset: Dataset) -> Dict[str, Dict[str, str]]:
    """Segmented file → its md5 and that of the published one, where the settings are those of the latter."""
    published = dataset.published
    pair = {settings.get("source"), settings.get("target")}
    if not published or set(published.languages) != pair or settings.get("codes"):
        return {}
    if settings["bpe"] != published.merges:
        return {}
    return {
        f"bpe/{name}": {"md5": checksum(root / "bpe" / name, "md5"), "published": md5}
        for name, md5 in published.md5.items()
        if (root / "bpe" / name).is_file()
    }


def read_manifest(folder: Path) -> Dict[str, Any]:
    """manifest.json of a folder, {} where there is none."""
    try:
        return read_json(folder / MANIFEST, "Prepare the data again.")
    except FileNotFoundError:
        return {}


def summary(manifest: Mapping[str, Any], root: Path) -> List[str]:
    """The manifest for people: lines per split beside the published numbers, drops, where things are."""
    out = [f"{'split':8s} {'lines':>12s}  published"]
    for split, count in manifest["lines"].items():
        expected = count["expected"]
        same = "" if expected is None else "the same" if expected == count["found"] else f"{expected:,}!"
        out.append(f"{split:8s} {count['found']:12,d}  {same}".rstrip())
    for stage, facts in manifest["stages"].items():
        for split, fact in facts.items():
            if isinstance(fact, dict):
                drops = [f"{n:,} dropped: {why}" for why, n in fact.get("dropped", {}).items()]
                out += [f"{stage} of {split}: {fact['read']:,} read, {', '.join(drops)}"] if drops else []
    compared = manifest["published"]
    other = [name for name, one in compared.items() if one["md5"] != one["published"]]
    if other:
        out.append(f"! {', '.join(other)}: not the published text (by md5; manifest.json has both).")
    elif compared:
        out.append(f"{', '.join(compared)}: equal to the published text, byte for byte (md5)")
    different = [split for split, n in manifest["lines"].items() if n["expected"] not in (None, n["found"])]
    if different:
        out.append(f"! {', '.join(different)}: another number of lines than published; see the drops above.")
    out.append(f"{root}/manifest.json has sources, checksums, counts and versions.")
    return out
