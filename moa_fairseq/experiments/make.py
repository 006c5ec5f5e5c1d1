"""The one loop that makes files: it shows, runs, skips, resumes and logs a list of steps.

A step is done if `state.json` in the folder of the list has the fingerprint of its inputs, and its output has
not changed since. An output gets its name when it is complete; before, its name is `NAME.partial`.
`state.json` also has a `provenance` for each session that wrote a part of an output.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.records.json_files import Values, changes, saved_json, write_json
from moa_fairseq.experiments.records.provenance import provenance
from moa_fairseq.files import atomic_write, disk_errors, refuse_link, remove_leftovers
from moa_fairseq.process import ERRORS_TOO, PATIENCE_SECONDS, REDIRECT, Executor, locked, to_shell

OUT = "{out}"  # the output's place in a command
STATE = "state.json"
COMMANDS = "commands.sh"
log = logging.getLogger(__name__)
Inputs = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
Record = Values  # the entry of a step in STATE


@dataclasses.dataclass(frozen=True)
class Step:
    """One file or folder, and how it is made.

    Args:
        name: the name of the step in state.json and of its log.
        output: the file or folder.
        argv: a command, in which OUT stands for the output; or a function that writes to the path that it is
            given and returns facts (JSON values).
        inputs: what the output depends on: names → JSON values, files (by size and time) and earlier steps in
            the same folder; or a function that returns them, and raises UserError if one is missing.
        captured: "out" or "both": the output is what the command prints, without or with its errors; "": the
            command writes the output itself.
        used: a function that returns further inputs, known only after the output is made. Its arguments are
            the facts of the output, and whether to compute these inputs again or return those recorded.
        watch: a function that gets each line that the command prints.
        finish: a function that gets the command's output, checks or completes it, and returns facts.
        in_place: True if the output is a folder in which the command itself resumes (fairseq's checkpoints).
            It resumes for another `goal`; other inputs are an error, so that no training is lost.
        goal: the end of a step in place, in values that JSON has.
        ready: a function that prepares a folder with content for resuming in it.
        conditions: conditions for `provenance`, such as the hardware; or a function that returns them when
            the step begins.
        upgrade: a function that converts an entry of state.json by an earlier version into today's form.
    """

    name: str
    output: Path
    argv: Sequence[str] | Callable[[Path], Any]
    inputs: Inputs = dataclasses.field(default_factory=dict)
    captured: str = ""
    used: Callable[[Any, bool], Mapping[str, Any]] = lambda facts, recompute: {}
    watch: Callable[[str], None] | None = None
    finish: Callable[[Path], Any] = lambda made: None
    in_place: bool = False
    goal: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ready: Callable[[], None] = lambda: None
    conditions: Inputs = dataclasses.field(default_factory=dict)
    upgrade: Callable[[Record], Record] = lambda record: record

    @property
    def has_content(self) -> bool:
        """Whether the output is a folder that is not empty."""
        return self.output.is_dir() and any(self.output.iterdir())

    @property
    def command(self) -> list[str]:
        """The command to show, with the output's name in place of OUT; [] for a function."""
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
) -> Values:
    """Run every wanted step whose output is missing or outdated, in order.

    Args:
        steps: all steps; one that is not wanted may be an input of others.
        folder: the folder of state.json and the logs, which only one program uses at a time.
        executor: runs the commands.
        dry_run: True to show the commands and do nothing.
        patience: seconds to wait for another program that uses the folder.
        commands: the file that records the commands (default: COMMANDS in the folder).
        whole: the command line that makes everything. It is shown and recorded; the commands of the steps,
            which need the outputs of functions, follow it as comments.
        wanted: a function that tells whether to run a step.

    Returns:
        Name of each wanted step → its facts; {} for a dry run.

    Raises:
        UserError: if a step fails, if a step in place that is not wanted was begun with other inputs, or if
            another program uses the folder for too long.
    """
    executor = executor or Executor()
    workshop = _Workshop(folder, executor, commands or folder / COMMANDS, "#   " if whole else "")
    if dry_run:
        if whole:
            log.info("$ %s", whole)
        for command in filter(None, (step.command for step in steps if wanted(step))):
            log.info("%s%s", workshop.prefix or "$ ", to_shell(command, executor.environment))
        return {}
    facts = {}
    with locked(folder, patience), disk_errors(folder):
        remove_leftovers(folder, ".*.tmp")
        if whole:
            keep_command(whole, workshop.commands)
        for step in steps:
            if wanted(step):
                facts[step.name] = _make_one(step, workshop)
            elif step.in_place:
                records = read_step_records(folder)
                record = step.upgrade(records.get(step.name, {}))
                _check_same_inputs(step, record, _resolved(step, records))
    return facts


class _Workshop(NamedTuple):
    """What makes the steps of a folder: the executor, and the file that records commands behind a prefix."""

    folder: Path
    executor: Executor
    commands: Path
    prefix: str


def _make_one(step: Step, workshop: _Workshop) -> Any:
    """Make the output of a step, unless it is done. Returns its facts."""
    folder = workshop.folder
    records = read_step_records(folder)
    inputs = _resolved(step, records)
    record = step.upgrade(records.get(step.name, {}))
    if _is_done(step, record, inputs, folder):
        log.info("%s: done before (%s)", step.name, step.output)
        return record["facts"]
    conditions = step.conditions() if callable(step.conditions) else step.conditions
    session = provenance(**conditions)
    if step.in_place:
        facts, made_by = _make_in_place(step, record, inputs, session, workshop)
        files = {}
    else:
        facts = _make_anew(step, workshop)
        made_by = [session]
        files = _sizes(step.output, folder)
    goal = dict(step.goal)
    inputs.update(step.used(facts, False))
    outcome = {"inputs": inputs, "goal": goal, "facts": facts, "files": files, "made_by": made_by}
    write_step_record(folder, step.name, fingerprint=fingerprint_of(inputs, goal), **outcome)
    return facts


def _is_done(step: Step, record: Record, inputs: Values, folder: Path) -> bool:
    """Whether the record has these inputs and this goal, and the output has not changed since."""
    if not record.get("fingerprint"):
        return False
    inputs = inputs | dict(step.used(record["facts"], True))
    recorded = fingerprint_of(record["inputs"], record.get("goal", {}))
    if recorded != fingerprint_of(inputs, dict(step.goal)):
        return False
    if step.in_place:
        return step.has_content
    files = record["files"]
    return bool(files) and files.items() <= _sizes(step.output, folder).items()


def _make_anew(step: Step, workshop: _Workshop) -> Any:
    """Make an output that replaces an earlier one. Returns its facts.

    The order of writes makes a crash harmless: NAME.partial, the removal of the old record, the rename to
    NAME, the new record. So no record ever has the fingerprint of another output.
    """
    partial = step.output.with_name(f"{step.output.name}.partial")
    step.output.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)
    facts = _execute(step, partial, workshop)
    write_step_record(workshop.folder, step.name)
    replace(partial, step.output)
    return facts


def _make_in_place(
    step: Step, record: Record, inputs: Values, session: Values, workshop: _Workshop
) -> tuple[Values, list[Values]]:
    """Begin or resume a step in place. Returns its facts, and the sessions that made it.

    A record without a fingerprint is written first, so that an interrupted step's inputs are known.
    """
    facts: Values = {}
    sessions: list[Values] = []
    _check_same_inputs(step, record, inputs)
    if step.has_content:
        facts = record.get("facts") or {}
        sessions = made_by_of(record, step.output)
        step.ready()
    session["from"] = _contents(step.output)
    start: Record = {"inputs": inputs, "facts": facts, "made_by": [*sessions, session]}
    write_step_record(workshop.folder, step.name, **start)
    for key, value in (_execute(step, step.output, workshop) or {}).items():
        if value is not None:  # a resumed training may not measure all of its facts again
            facts[key] = value
    # The session of a training that had nothing left to do is left out, unless it is the only one
    return facts, made_by_of(start, step.output) or [session]


def _execute(step: Step, output: Path, workshop: _Workshop) -> Any:
    """Run the command or function that writes `output`, which must not be empty. Returns its facts."""
    log_file = workshop.folder / f"{step.name}.log"
    if callable(step.argv):
        facts = step.argv(output)
    else:
        line = to_shell(step.command, workshop.executor.environment)
        log.info("$ %s", line)
        keep_command(workshop.prefix + line, workshop.commands)
        words = [word.replace(OUT, str(output)) for word in step.argv]
        workshop.executor.run(
            words,
            log_file,
            output=output if step.captured else None,
            on_line=step.watch,
            errors_too=step.captured == "both",
        )
        facts = step.finish(output)
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"{step.name} ended without writing {step.output}; see {log_file}.")
    return facts


def _check_same_inputs(step: Step, record: Record, inputs: Values) -> None:
    """Raise UserError if a step in place was begun with other inputs."""
    before = record.get("inputs")
    if before == inputs or not step.has_content:
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


def _resolved(step: Step, records: Mapping[str, Any]) -> Values:
    """The inputs of a step as state.json has them. Raises UserError for a missing file."""
    inputs = step.inputs() if callable(step.inputs) else step.inputs
    resolved = {}
    for name, value in inputs.items():
        if isinstance(value, Step):
            if not value.output.exists():
                remedy = f"run --stage {value.name.partition('-')[0]} first (or --stage all)"
                raise UserError(f"{value.output} is missing: {remedy}.")
            resolved[name] = [records.get(value.name, {}).get("fingerprint")]
            if value.output.is_file():
                resolved[name] += file_signature(value.output)
        elif isinstance(value, Path):
            if not value.is_file():
                raise UserError(f"{value} is missing: {step.name} needs it.")
            resolved[name] = file_signature(value)
        else:
            resolved[name] = value
    return json.loads(json.dumps(resolved))  # tuples become lists, as in the record


def _contents(folder: Path) -> str:
    """A digest that changes when a file in the folder is written, added or removed."""
    contents = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # a running training removes files
            if path.is_file():
                contents.append([os.path.relpath(path, folder), *file_signature(path)[1:]])
    return fingerprint_of(contents)


def _sizes(output: Path, folder: Path) -> dict[str, int]:
    """Path relative to `folder` → bytes, for an output that is a file, or for its files except logs."""
    paths = output.rglob("*") if output.is_dir() else [output]
    files = (path for path in paths if path.is_file() and path.suffix != ".log")
    return {os.path.relpath(path, folder): path.stat().st_size for path in files}


def read_step_records(folder: Path) -> dict[str, Record]:
    """Name of a step → its entry in state.json, without damaged entries and those of older versions."""
    return {
        name: record for name, record in saved_json(folder / STATE).items() if _is_entry(record)
    }


def _is_entry(record: Any) -> bool:
    """Whether a value of state.json is a step's entry that this version wrote."""
    if not isinstance(record, dict) or "inputs" not in record:
        return False
    if record.get("fingerprint") is not None and not {"files", "facts"} <= record.keys():
        return False
    kinds = {"inputs": dict, "files": dict, "goal": dict, "made_by": list}
    return all(isinstance(record.get(key, kind()), kind) for key, kind in kinds.items())


def made_by_of(record: Record, output: Path | None = None) -> list[Values]:
    """The sessions that made the output of a step.

    Args:
        record: the entry of the step, see `read_step_records`.
        output: the output of an unfinished step in place: its last session is left out if it changed nothing.

    Returns:
        The `provenance` of each session, in order; [] if an earlier version made the output.
    """
    sessions = [dict(session) for session in record.get("made_by", []) if isinstance(session, dict)]
    if output and sessions and sessions[-1].get("from") == _contents(output):
        del sessions[-1]
    return sessions


def write_step_record(folder: Path, name: str, **record: Any) -> None:
    """Replace the entry of a step in state.json.

    Args:
        folder: the folder of the file.
        name: the name of the step.
        record: the new entry; without any the entry is removed.
    """
    records = read_step_records(folder)
    records.pop(name, None)
    if record:
        records[name] = record
    write_json(folder / STATE, dict(sorted(records.items())))


def keep_command(line: str, commands: Path) -> None:
    """Add a command to the script of commands that were run, once: a resumed run repeats its commands.

    Args:
        line: a command for a shell, or a comment.
        commands: the script, which is made if necessary.
    """
    refuse_link(commands)
    lines = ["#!/usr/bin/env bash", "# What was executed here, in order.", "set -euo pipefail"]
    if commands.is_file():
        lines = commands.read_text("utf-8").splitlines() or lines
    if line not in lines:
        with atomic_write(commands) as stream:
            stream.write("\n".join([*lines, line]) + "\n")


def fingerprint_of(*values: Any) -> str:
    """A digest of JSON values, of 16 hexadecimal digits."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_signature(path: Path) -> list[Any]:
    """Name, size and modification time of a file, which show whether it was written again."""
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]


def remove(path: Path) -> None:
    """Delete a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace(new: Path, target: Path) -> None:
    """Rename `new` to `target`. A folder that is there is first moved aside, and removed last."""
    aside = target.with_name(f"{target.name}.old")
    remove(aside)
    if target.is_dir() or (new.is_dir() and target.exists()):
        os.replace(target, aside)
    os.replace(new, target)
    remove(aside)
