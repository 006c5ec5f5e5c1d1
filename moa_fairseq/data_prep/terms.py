"""What is said and checked before a download: terms of use, its size, whether the disk holds it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Callable, Dict, Sequence

from moa_fairseq.data_prep.catalogue import Dataset, PublicFile
from moa_fairseq.errors import UserError

OVERRIDE = "MOA_FAIRSEQ_IGNORE_DISK"


def before_download(
    dataset: Dataset, root: Path, downloads: Path, say: Callable[[str], None], missing: Sequence[PublicFile]
) -> None:
    """Say the terms of a data set and the size of the files that are `missing`, and check the free disk.

    root: where the stages will be. Raises UserError when the disk is too small for them and for what is
    fetched, unless the environment variable OVERRIDE is set.
    """
    if dataset.licence:
        say(f"{dataset.name}: terms of use: {dataset.licence}")
    size = sum(file.bytes for file in missing)
    files = "1 file" if len(missing) == 1 else f"{len(missing)} files"
    say(
        f"to download: {files}, about {human(size)}, into {downloads}; prepared, the data set takes about "
        f"{human(dataset.disk * 1e9)} of disk, downloads included"
    )
    if not os.environ.get(OVERRIDE):
        _check_disk(dataset, root, downloads, size)


def human(size: float) -> str:
    """Bytes in words: 1.8 GB, 23 MB, 0.6 MB."""
    unit, divisor = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6)
    return f"{size / divisor:.0f} {unit}" if size >= 10 * divisor else f"{size / divisor:.1f} {unit}"


def _check_disk(dataset: Dataset, root: Path, downloads: Path, size: int) -> None:
    kept = [downloads / file.name for file in dataset.files(dataset.languages)]
    there = sum(path.stat().st_size for path in [*kept, *root.rglob("*")] if path.is_file())
    needs: Dict[int, float] = {}
    places: Dict[int, Path] = {}
    for place, need in ((downloads, size), (root, dataset.disk * 1e9 - size - there)):
        device = _existing(place).stat().st_dev
        needs[device] = needs.get(device, 0) + max(need, 0)
        places[device] = place
    for device, need in needs.items():
        free = shutil.disk_usage(_existing(places[device])).free
        if free < need:
            raise UserError(
                f"{dataset.name} needs about {human(need)} more on the disk of {places[device]}, which has "
                f"{human(free)} free. Free some space, or choose another folder. To try all the same, set "
                f"{OVERRIDE}=1: finished stages are kept when the disk fills up."
            )


def _existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
