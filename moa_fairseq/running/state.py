"""What is known of the steps that were made in a folder: state.json, by their names, and commands.sh."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping

from moa_fairseq.files import atomic_write, refuse_link
from moa_fairseq.json_files import saved_json, write_json

STATE = "state.json"


def marks(folder: Path) -> Dict[str, Dict[str, Any]]:
    """name of a step → what state.json says of it, but for damaged entries and those of older versions."""
    kinds = {"inputs": dict, "files": dict, "goal": dict}
    return {
        name: mark
        for name, mark in saved_json(folder / STATE).items()
        if isinstance(mark, dict)
        and "inputs" in mark
        and all(isinstance(mark.get(key, {}), kind) for key, kind in kinds.items())
        and (mark.get("fingerprint") is None or {"files", "facts"} <= mark.keys())
    }


def put_mark(folder: Path, name: str, **mark: Any) -> None:
    """Replace the entry of a step in state.json; an empty one is taken out."""
    others = {key: value for key, value in marks(folder).items() if key != name}
    write_json(folder / STATE, dict(sorted({**others, **({name: mark} if mark else {})}.items())))


def keep_command(line: str, commands: Path) -> None:
    """Add a command to the script of what was run (once: a resumed run repeats it)."""
    refuse_link(commands)
    kept = commands.read_text(encoding="utf-8").splitlines() if commands.is_file() else []
    kept = kept or ["#!/usr/bin/env bash", "# What was executed here, in order.", "set -euo pipefail"]
    if line not in kept:
        with atomic_write(commands) as stream:
            stream.write("\n".join([*kept, line]) + "\n")


def fingerprint_of(*values: Any) -> str:
    """16 hexadecimal digits that change when any of the JSON values does."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def stamp(path: Path) -> List[Any]:
    """Name, size and time of a file: enough to tell that it was made again."""
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]


def changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Dict[str, str]:
    """Dotted key → 'old → new' for every value that differs between two mappings of JSON values."""
    found: Dict[str, str] = {}
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key, "not set"), now.get(key, "not set")
        if isinstance(old, dict) and isinstance(new, dict):
            found.update(changes(old, new, f"{prefix}{key}."))
        elif old != new:
            found[f"{prefix}{key}"] = f"{old} → {new}"
    return found


def remove(path: Path) -> None:
    """Delete a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace(new: Path, old: Path) -> None:
    """Rename `new` to `old`; a folder that was there is moved aside first and removed last."""
    aside = old.with_name(old.name + ".old")
    remove(aside)
    if old.is_dir() or (new.is_dir() and old.exists()):
        os.replace(old, aside)
    os.replace(new, old)
    remove(aside)
