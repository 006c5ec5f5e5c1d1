"""The one loop that makes files: shows, runs, skips, resumes and logs a list of steps.

A step is done when the fingerprint of its inputs stands in `state.json` of the folder that the list is made
in, and its output is as it was then. An output gets its name when it is whole; before, it is `NAME.partial`.
`state.json` also says what made each output: a `provenance` for each session that left something in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.records.json_files import changes, saved_json, write_json
from moa_fairseq.experiments.records.provenance import provenance
from moa_fairseq.files import atomic_write, disk_errors, refuse_link, remove_leftovers
from moa_fairseq.process import ERRORS_TOO, PATIENCE_SECONDS, REDIRECT, Executor, locked, to_shell

OUT = "{out}"  # in a command: where it writes
STATE = "state.json"
COMMANDS = "commands.sh"
PARTIAL = ".partial"
COMMENT = "#   "
log = logging.getLogger(__name__)
Inputs = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
Record = dict[str, Any]  # of a step in STATE


@dataclasses.dataclass(frozen=True)
class Step:
    """One file or folder, and what makes it.

    Args:
        name: of the step in state.json, and of its log.
        output: the file or folder.
        argv: a command, in which OUT stands for the output, or a function that writes to the path it is given
            and returns facts (JSON values).
        inputs: what the output follows from, by name: JSON values, files (their size and time count), and
            earlier steps of the same folder; or a function that finds them, which raises UserError where one
            is missing.
        captured: "out" or "both" (errors, too): what the command prints is the output; "": it writes it
            itself.
        used: further inputs, which only the making could tell: gets the facts of the output, and whether they
            are to be looked at anew; else they are as they were when it was made.
        watch: gets each line that a command prints.
        finish: gets the path of what a command made, checks or completes it, and returns facts.
        in_place: the output is a folder in which the command goes on by itself (fairseq's checkpoints).
            Another `goal` is gone on to; other inputs are refused, so that no training is lost.
        goal: of a step in place: how far it goes, as JSON values.
        ready: makes a folder that holds something ready for going on in it.
        conditions: what `provenance` says of the step beside commit and versions, such as the hardware; or a
            function that finds it when the step begins.
        as_of_today: turns an entry of state.json that an earlier version wrote into today's.
    """

    name: str
    output: Path
    argv: Sequence[str] | Callable[[Path], Any]
    inputs: Inputs = dataclasses.field(default_factory=dict)
    captured: str = ""
    used: Callable[[Any, bool], Mapping[str, Any]] = lambda facts, anew: {}
    watch: Callable[[str], None] | None = None
    finish: Callable[[Path], Any] = lambda made: None
    in_place: bool = False
    goal: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ready: Callable[[], None] = lambda: None
    conditions: Inputs = dataclasses.field(default_factory=dict)
    as_of_today: Callable[[Record], Record] = lambda record: record

    @property
    def begun(self) -> bool:
        """True when the output is a folder that holds something."""
        return self.output.is_dir() and any(self.output.iterdir())

    @property
    def command(self) -> list[str]:
        """What is shown of it, with the output's own name; empty for a function."""
        if callable(self.argv):
            return []
        words = [word.replace(OUT, str(self.output)) for word in self.argv]
        if self.captured:
            words += [REDIRECT, str(self.output)]
        if self.captured == "both":
            words.append(ERRORS_TOO)
        return words


def make(
    steps: Sequence[Step],
    folder: Path,
    *,
    executor: Executor | None = None,
    dry_run: bool = False,
    patience: float = PATIENCE_SECONDS,
    commands: Path | None = None,
    whole: str = "",
    wanted: Callable[[Step], bool] = lambda step: True,
) -> dict[str, Any]:
    """Make every wanted output that is not there yet, in order; finished ones stay.

    Args:
        steps: all of them; one that is not wanted may be an input of others.
        folder: keeps state.json and the logs; one program at a time makes something in it.
        executor: runs the commands.
        dry_run: the commands are shown, and nothing is done.
        patience: seconds to wait for another program that is at work in the folder.
        commands: the file that keeps what was run, else COMMANDS in the folder.
        whole: the line that makes all of it; it is shown and kept, and the commands, which need what
            functions make, stand below it as comments.
        wanted: whether a step is to be made.

    Returns:
        Name of each wanted step → its facts; {} of a dry run.

    Raises:
        UserError: where a step fails, one that is not wanted was begun in place from other inputs, or another
            program keeps the folder.
    """
    executor = executor or Executor()
    commands = commands or folder / COMMANDS
    facts = {}
    prefix = COMMENT if whole else ""
    if dry_run:
        if whole:
            log.info("$ %s", whole)
        for command in filter(None, (step.command for step in steps if wanted(step))):
            log.info("%s%s", prefix or "$ ", to_shell(command, executor.environment))
        return {}
    with locked(folder, patience), disk_errors(folder):
        remove_leftovers(folder, ".*.tmp")
        if whole:
            keep_command(whole, commands)
        for step in steps:
            if wanted(step):
                facts[step.name] = _make_one(step, folder, executor, commands, prefix)
            elif step.in_place:
                records = read_step_records(folder)
                record = step.as_of_today(records.get(step.name, {}))
                _refuse_others(step, record, _resolved(step, records))
    return facts


def _make_one(step: Step, folder: Path, executor: Executor, commands: Path, prefix: str) -> Any:
    """Make the output of a step, unless it is done. Returns its facts.

    Crash safety rests on the order of writes. A step in place: a record without a fingerprint, the output,
    the whole record. Any other step: NAME.partial, the removal of the old record, the rename to NAME, the new
    record. So no record ever has the fingerprint of another output.
    """
    records = read_step_records(folder)
    inputs = _resolved(step, records)
    record = step.as_of_today(records.get(step.name, {}))
    if _is_done(step, record, inputs, folder):
        log.info("%s: done before (%s)", step.name, step.output)
        return record["facts"]
    conditions = step.conditions() if callable(step.conditions) else step.conditions
    made_by = [provenance(**conditions)]
    files = {}
    if step.in_place:
        earlier_facts, made_by = _begin_in_place(step, record, inputs, made_by[0], folder)
        facts = _execute(step, step.output, folder, executor, commands, prefix)
        new_facts = {key: value for key, value in (facts or {}).items() if value is not None}
        facts = earlier_facts | new_facts
        made_by = made_by_of({"made_by": made_by}, step.output) or made_by
    else:
        partial = step.output.with_name(step.output.name + PARTIAL)
        step.output.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        facts = _execute(step, partial, folder, executor, commands, prefix)
        write_step_record(folder, step.name)
        replace(partial, step.output)
        files = _sizes(step.output, folder)
    goal = dict(step.goal)
    inputs.update(step.used(facts, False))
    fingerprint = fingerprint_of(inputs, goal)
    outcome = {"inputs": inputs, "goal": goal, "facts": facts, "files": files, "made_by": made_by}
    write_step_record(folder, step.name, fingerprint=fingerprint, **outcome)
    return facts


def _is_done(step: Step, record: Record, inputs: dict[str, Any], folder: Path) -> bool:
    """True if the record is of these inputs and this goal, and the output is as it was then."""
    used = dict(step.used(record.get("facts"), True))
    fingerprint = fingerprint_of(inputs | used, dict(step.goal))
    if not record.get("fingerprint"):
        return False
    if fingerprint_of(record["inputs"], record.get("goal", {})) != fingerprint:
        return False
    if step.in_place:
        return step.begun
    files = record["files"]
    return bool(files) and files.items() <= _sizes(step.output, folder).items()


def _begin_in_place(
    step: Step, record: Record, inputs: dict[str, Any], session: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Record that a step in place begins. Returns the earlier facts, and all sessions with this one.

    The record is written before the command starts, so that an interrupted step is known by its inputs.
    """
    facts: dict[str, Any] = {}
    made_by = [session]
    _refuse_others(step, record, inputs)
    if step.begun:
        facts = record.get("facts") or {}
        made_by = [*made_by_of(record, step.output), session]
        step.ready()
    session["from"] = _contents(step.output)
    write_step_record(folder, step.name, inputs=inputs, facts=facts, made_by=made_by)
    return facts, made_by


def _execute(
    step: Step, output: Path, folder: Path, executor: Executor, commands: Path, prefix: str
) -> Any:
    """Run the command or function that writes `output`. Returns its facts.

    Raises:
        UserError: if it fails, or `output` is missing or empty.
    """
    if callable(step.argv):
        facts = step.argv(output)
    else:
        line = to_shell(step.command, executor.environment)
        log.info("$ %s", line)
        keep_command(prefix + line, commands)
        words = [word.replace(OUT, str(output)) for word in step.argv]
        executor.run(
            step.command if step.in_place else words,
            folder / f"{step.name}.log",
            output=output if step.captured else None,
            on_line=step.watch,
            errors_too=step.captured == "both",
        )
        facts = step.finish(output)
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        raise UserError(
            f"{step.name} ended without writing {step.output}; see {folder / step.name}.log."
        )
    return facts


def _refuse_others(step: Step, record: Record, inputs: dict[str, Any]) -> None:
    before = record.get("inputs")
    if before == inputs or not step.begun:
        return
    remedy = "Use another --save-dir, or --restart to move this one aside and start again."
    if before is None:
        raise UserError(
            f"{step.output} holds files of which {STATE} beside it says nothing: this version of this recipe "
            f"did not make them, or {STATE} was damaged. {remedy}"
        )
    differences = list(changes(before, inputs).items())[:5]
    listed = "; ".join(f"{key}: {change}" for key, change in differences)
    raise UserError(f"{step.output} was made with other settings ({listed}). {remedy}")


def _resolved(step: Step, known: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a step as they are read back from JSON. Raises UserError for a file that is missing."""

    def plain(value: Any) -> Any:
        if isinstance(value, Step):
            if not value.output.exists():
                stage = value.name.partition("-")[0]
                raise UserError(
                    f"{value.output} is missing: run --stage {stage} first (or --stage all)."
                )
            fingerprint = known.get(value.name, {}).get("fingerprint")
            return [fingerprint, *(file_signature(value.output) if value.output.is_file() else ())]
        if isinstance(value, Path):
            if not value.is_file():
                raise UserError(f"{value} is missing: {step.name} needs it.")
            return file_signature(value)
        return value

    inputs = step.inputs() if callable(step.inputs) else step.inputs
    return json.loads(json.dumps({name: plain(value) for name, value in inputs.items()}))


def _contents(folder: Path) -> str:
    """Digits that change when a file in the folder is written, added or taken away."""
    contents = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # a training that is at work takes files away
            if path.is_file():
                contents.append([os.path.relpath(path, folder), *file_signature(path)[1:]])
    return fingerprint_of(contents)


def _sizes(output: Path, folder: Path) -> dict[str, int]:
    """Name, seen from `folder`, → bytes of a file, or of the files in a folder, logs aside."""
    paths = output.rglob("*") if output.is_dir() else [output]
    files = (path for path in paths if path.is_file() and path.suffix != ".log")
    return {os.path.relpath(path, folder): path.stat().st_size for path in files}


def read_step_records(folder: Path) -> dict[str, Record]:
    """name of a step → what state.json says of it, but for damaged entries and those of older versions."""
    return {
        name: record for name, record in saved_json(folder / STATE).items() if _is_entry(record)
    }


def _is_entry(record: Any) -> bool:
    if not isinstance(record, dict) or "inputs" not in record:
        return False
    kinds = {"inputs": dict, "files": dict, "goal": dict, "made_by": list}
    has_kinds = all(isinstance(record[key], kind) for key, kind in kinds.items() if key in record)
    return has_kinds and (record.get("fingerprint") is None or {"files", "facts"} <= record.keys())


def made_by_of(record: Record, output: Path | None = None) -> list[dict[str, Any]]:
    """What made the output of a step.

    Args:
        record: of the step, as `read_step_records` has it.
        output: of a step in place that has not ended: whether its last session left something is looked at.

    Returns:
        `provenance` of each session that left something, in order; none where an earlier version made it.
    """
    sessions = [dict(session) for session in record.get("made_by", []) if isinstance(session, dict)]
    if output and sessions and sessions[-1].get("from") == _contents(output):
        del sessions[-1]
    return sessions


def write_step_record(folder: Path, name: str, **record: Any) -> None:
    """Replace the entry of a step in state.json.

    Args:
        folder: what the file lies in.
        name: of the step.
        record: the entry; an empty one is taken out.
    """
    records = read_step_records(folder)
    records.pop(name, None)
    if record:
        records[name] = record
    write_json(folder / STATE, dict(sorted(records.items())))


def keep_command(line: str, commands: Path) -> None:
    """Add a command to the script of what was run (once: a resumed run repeats it).

    Args:
        line: for a shell, or a comment.
        commands: the script, which is begun where there is none.
    """
    refuse_link(commands)
    lines = []
    if commands.is_file():
        lines = commands.read_text("utf-8").splitlines()
    lines = lines or [
        "#!/usr/bin/env bash",
        "# What was executed here, in order.",
        "set -euo pipefail",
    ]
    if line not in lines:
        with atomic_write(commands) as stream:
            stream.write("\n".join([*lines, line]) + "\n")


def fingerprint_of(*values: Any) -> str:
    """16 hexadecimal digits that change when any of the JSON values does."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_signature(path: Path) -> list[Any]:
    """Name, size and time of a file: enough to tell that it was made again."""
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]


def remove(path: Path) -> None:
    """Delete a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace(new: Path, old: Path) -> None:
    """Rename `new` to `old`; a folder that was there is moved aside first and removed last."""
    aside = old.with_name(f"{old.name}.old")
    remove(aside)
    if old.is_dir() or (new.is_dir() and old.exists()):
        os.replace(old, aside)
    os.replace(new, old)
    remove(aside)
