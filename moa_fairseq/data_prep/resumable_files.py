"""Text files that are written together, step by step, so that an interruption costs one step."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterator, Sequence, Tuple

from moa_fairseq.data_prep.stage_folder import file_size
from moa_fairseq.json_files import saved_json, write_json

PROGRESS = "progress.json"


@contextlib.contextmanager
def resumable_files(
    folder: Path, names: Sequence[str]
) -> Iterator[Tuple[Dict[str, IO[str]], Dict[str, Any], Callable[[], None]]]:
    """Open files in `folder` for appending, cut back to the last commit; tidy up when the block ends well.

    Yields the streams by name, a mapping of JSON values (empty at the beginning) for what else is to be
    known after an interruption, and the function that commits: it makes both survive a crash.
    """
    note = saved_json(folder / PROGRESS)
    sizes, state = note.get("sizes", {}), note.get("state", {})
    if not all(file_size(folder / name) >= sizes.get(name, 0) for name in names):
        sizes, state = {}, {}
    with contextlib.ExitStack() as stack:
        streams: Dict[str, IO[str]] = {}
        for name in names:
            path = folder / name
            path.touch()
            os.truncate(path, sizes.get(name, 0))
            streams[name] = stack.enter_context(open(path, "a", encoding="utf-8", newline="\n"))

        def commit() -> None:
            for stream in streams.values():
                stream.flush()
                os.fsync(stream.fileno())
            sizes = {name: os.fstat(stream.fileno()).st_size for name, stream in streams.items()}
            write_json(folder / PROGRESS, {"sizes": sizes, "state": state})

        yield streams, state, commit
    (folder / PROGRESS).unlink(missing_ok=True)
