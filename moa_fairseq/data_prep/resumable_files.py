"""Text files that are written together, step by step, so that an interruption costs one step."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO, Any, Dict, Iterator, Sequence

from moa_fairseq.data_prep.stage_folder import file_size, saved_json, write_json

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
        write_json(self.folder / PROGRESS, {"sizes": sizes, "state": state})
        self.state = state


@contextlib.contextmanager
def resumable_files(folder: Path, names: Sequence[str]) -> Iterator[ResumableFiles]:
    """Open files in `folder` for appending, cut back to the last commit; tidy up when the block ends well."""
    note = saved_json(folder / PROGRESS)
    sizes, state = note.get("sizes", {}), note.get("state", {})
    if not all(file_size(folder / name) >= sizes.get(name, 0) for name in names):
        sizes, state = {}, {}
    with contextlib.ExitStack() as stack:
        streams = {}
        for name in names:
            path = folder / name
            path.touch()
            os.truncate(path, sizes.get(name, 0))
            streams[name] = stack.enter_context(open(path, "a", encoding="utf-8", newline="\n"))
        yield ResumableFiles(folder, streams, state)
    (folder / PROGRESS).unlink(missing_ok=True)
