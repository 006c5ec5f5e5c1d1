"""Text files that are written together, step by step, so that an interruption costs one step."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import IO, Any, Dict, Iterator, Sequence

from moa_fairseq.files import atomic_write

PROGRESS = "progress.json"


class ResumableFiles:
    """Appends to `folder/name` files. What was committed stays; what came after the last commit is undone.

    state: what the last commit was told (a JSON value), {} at the beginning.
    """

    def __init__(self, folder: Path, streams: Dict[str, IO[str]], state: Dict[str, Any]) -> None:
        self.folder = folder
        self.streams = streams
        self.state = state

    def write(self, name: str, text: str) -> None:
        """Append one line, without its line end, to a file."""
        self.streams[name].write(text + "\n")

    def commit(self, state: Dict[str, Any]) -> None:
        """Make all that was written so far survive a crash, together with `state`."""
        sizes = {}
        for name, stream in self.streams.items():
            stream.flush()
            os.fsync(stream.fileno())
            sizes[name] = os.fstat(stream.fileno()).st_size
        with atomic_write(self.folder / PROGRESS) as note:
            json.dump({"sizes": sizes, "state": state}, note)
        self.state = state


@contextlib.contextmanager
def resumable_files(folder: Path, names: Sequence[str]) -> Iterator[ResumableFiles]:
    """Open files in `folder` for appending, cut back to the last commit; tidy up when the block ends well."""
    try:
        note = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size >= note["sizes"][name] for name in names)
    except (OSError, ValueError, KeyError):
        whole = False
    sizes, state = (note["sizes"], note["state"]) if whole else (dict.fromkeys(names, 0), {})
    with contextlib.ExitStack() as stack:
        streams = {}
        for name in names:
            path = folder / name
            path.touch()
            os.truncate(path, sizes[name])
            streams[name] = stack.enter_context(open(path, "a", encoding="utf-8", newline="\n"))
        yield ResumableFiles(folder, streams, state)
    (folder / PROGRESS).unlink(missing_ok=True)
