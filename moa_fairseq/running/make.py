"""The one loop that makes files: shows, runs, skips, resumes and logs a list of steps.

A step is done when the fingerprint of its inputs stands in `state.json` of the folder that the list is made
in, and its output is as it was then. An output gets its name when it is whole; before, it is `NAME.partial`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Union

from moa_fairseq.errors import UserError
from moa_fairseq.files import disk_errors
from moa_fairseq.running.command_line import ERRORS_TOO, REDIRECT, to_shell
from moa_fairseq.running.folder_lock import PATIENCE_SECONDS, locked
from moa_fairseq.running.process import Executor
from moa_fairseq.running.state import (
    changes,
    fingerprint_of,
    keep_command,
    marks,
    put_mark,
    remove,
    replace,
    stamp,
)

OUT = "{out}"  # in a command: where it writes
COMMANDS, PARTIAL = "commands.sh", ".partial"
log = logging.getLogger(__name__)
Inputs = Union[Mapping[str, Any], Callable[[], Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Step:
    """One file or folder, and what makes it.

    argv: a command, in which OUT stands for the output, or a function that writes to the path it is given and
    returns facts (JSON values). inputs: what the output follows from, by name: JSON values, files (their
    size and time count), and earlier steps of the same folder; or a function that finds them, which raises
    UserError where one is missing. captured: "out" or "both" (errors, too): what the command prints is the
    output. watch: gets each printed line. finish: checks or completes what a command made, and returns facts.

    in_place: the output is a folder in which the command goes on by itself (fairseq's checkpoints). Another
    `goal` (how far it goes) is gone on to; other inputs are refused, so that no training is lost.
    """

    name: str
    output: Path
    argv: Union[Sequence[str], Callable[[Path], Any]]
    inputs: Inputs = dataclasses.field(default_factory=dict)
    captured: str = ""
    watch: Optional[Callable[[str], None]] = None
    finish: Callable[[Path], Any] = lambda made: None
    in_place: bool = False
    goal: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def command(self) -> List[str]:
        """What is shown of it, with the output's own name; empty for a function."""
        if callable(self.argv):
            return []
        words = [word.replace(OUT, str(self.output)) for word in self.argv]
        redirect = [REDIRECT, str(self.output)] if self.captured else []
        return [*words, *redirect, *([ERRORS_TOO] if self.captured == "both" else [])]


def make(
    steps: Sequence[Step],
    folder: Path,
    *,
    executor: Optional[Executor] = None,
    dry_run: bool = False,
    patience: float = PATIENCE_SECONDS,
    commands: Optional[Path] = None,
) -> Dict[str, Any]:
    """Make every output that is not there yet, in order; returns name → facts.

    folder: keeps state.json and the logs; one program at a time makes something in it (patience: seconds to
    wait for another). dry_run: the commands are shown, and nothing is done. commands: the file that keeps
    what was run. Raises UserError where a step fails; finished ones stay.
    """
    executor = executor or Executor()
    if dry_run:
        for command in filter(None, (step.command for step in steps)):
            log.info("$ %s", to_shell(command, executor.environment))
        return {}
    with locked(folder, patience), disk_errors(folder):
        return {step.name: _make_one(step, folder, executor, commands or folder / COMMANDS) for step in steps}


def _make_one(step: Step, folder: Path, executor: Executor, commands: Path) -> Any:
    known = marks(folder)
    inputs, mark = _resolved(step, known), known.get(step.name, {})
    if _is_made(step, mark, inputs, folder):
        log.info("%s: done before (%s)", step.name, step.output)
        return mark["facts"]
    if step.in_place:
        partial = step.output
        _refuse_others(step, mark, inputs)
        # Said before it begins, so that an interrupted one is known for what it is.
        put_mark(folder, step.name, inputs=inputs, facts=mark.get("facts") or {})
    else:
        partial = step.output.with_name(step.output.name + PARTIAL)
        step.output.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
    if callable(step.argv):
        facts = step.argv(partial)
    else:
        line = to_shell(step.command, executor.environment)
        log.info("$ %s", line)
        keep_command(line, commands)
        executor.run(
            [word.replace(OUT, str(partial)) for word in step.argv],
            folder / f"{step.name}.log",
            output=partial if step.captured else None,
            on_line=step.watch,
            errors_too=step.captured == "both",
        )
        facts = step.finish(partial)
    if not partial.exists() or (partial.is_dir() and not any(partial.iterdir())):
        raise UserError(f"{step.name} ended without writing {step.output}; see {folder / step.name}.log.")
    if step.in_place:
        known = mark.get("facts") or {}
        facts = {**known, **{key: value for key, value in (facts or {}).items() if value is not None}}
    else:
        put_mark(folder, step.name)  # from here on the old output is gone
        replace(partial, step.output)
    files = {} if step.in_place else _sizes(step.output, folder)
    values = {"inputs": inputs, "goal": dict(step.goal), "facts": facts, "files": files}
    put_mark(folder, step.name, fingerprint=fingerprint_of(inputs, dict(step.goal)), **values)
    return facts


def is_done(step: Step, folder: Path) -> bool:
    """Whether the step was made in this folder from the same inputs, and its output is as it was then."""
    known = marks(folder)
    return _is_made(step, known.get(step.name, {}), _resolved(step, known), folder)


def refuse_other_inputs(step: Step, folder: Path) -> None:
    """Raise UserError for an in-place output that was made from other inputs, naming the changes."""
    known = marks(folder)
    _refuse_others(step, known.get(step.name, {}), _resolved(step, known))


def _is_made(step: Step, mark: Mapping[str, Any], inputs: Mapping[str, Any], folder: Path) -> bool:
    if mark.get("fingerprint") != fingerprint_of(inputs, dict(step.goal)):
        return False
    if step.in_place:
        return _is_begun(step)
    return bool(mark["files"]) and mark["files"].items() <= _sizes(step.output, folder).items()


def _is_begun(step: Step) -> bool:
    return step.output.is_dir() and any(step.output.iterdir())


def _refuse_others(step: Step, mark: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    before = mark.get("inputs")
    if before == inputs or not _is_begun(step):
        return
    remedy = "Use another --save-dir, or --restart to move this one aside and start again."
    if before is None:
        raise UserError(f"{step.output} holds files that this version of this recipe did not make. {remedy}")
    listed = "; ".join(f"{key}: {change}" for key, change in list(changes(before, inputs).items())[:5])
    raise UserError(f"{step.output} was made with other settings ({listed}). {remedy}")


def _resolved(step: Step, known: Mapping[str, Any]) -> Dict[str, Any]:
    """The inputs of a step as they are read back from JSON. Raises UserError for a file that is missing."""

    def plain(value: Any) -> Any:
        if isinstance(value, Step):
            if not value.output.exists():
                raise UserError(
                    f"{value.output} is missing: run --stage {value.name.partition('-')[0]} first (or "
                    "--stage all)."
                )
            made = known.get(value.name, {}).get("fingerprint")
            return [made, *(stamp(value.output) if value.output.is_file() else ())]
        if isinstance(value, Path):
            if not value.is_file():
                raise UserError(f"{value} is missing: {step.name} needs it.")
            return stamp(value)
        return value

    found = step.inputs() if callable(step.inputs) else step.inputs
    return json.loads(json.dumps({name: plain(value) for name, value in found.items()}))


def _sizes(output: Path, folder: Path) -> Dict[str, int]:
    """Name, seen from `folder`, → bytes of a file, or of the files in a folder, logs aside."""
    paths = output.rglob("*") if output.is_dir() else [output]
    files = (path for path in paths if path.is_file() and path.suffix != ".log")
    return {os.path.relpath(path, folder): path.stat().st_size for path in files}
