"""A run's first stage: it makes its data, or finds existing data."""

import dataclasses
import logging
import re
from pathlib import Path

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import Prepared, is_binarised
from moa_fairseq.experiments.data.obtain import require_source
from moa_fairseq.experiments.data.prepare import LATER, Preparation, prepared_folder, size_digest
from moa_fairseq.experiments.make import (
    COMMANDS,
    Step,
    keep_command,
    make,
    read_step_records,
    write_step_record,
)
from moa_fairseq.experiments.recipes.checkpoints import prepare_facts, prepared_data
from moa_fairseq.experiments.recipes.run import Run
from moa_fairseq.experiments.records.json_files import changes, selected
from moa_fairseq.process import Executor, to_shell

# Data recipes that do not need --data: `moa-fairseq corpus` makes it.
EMBEDDED = ("embedded", "embedded_gpt2bpe")
_CORPUS = "embedded_en_de"  # the folder of that text
# The keys of the recipe's data section that affect a binarised folder; the others have no effect there.
BINARISED_KEYS = ("source", "target", "joined_dictionary")
# The lines of `moa-fairseq corpus` to show: every tenth package and the last ("[ 10/123]", "[123/123]"),
# skipped packages, the total.
_SHOWN = re.compile(
    r"\[ *(?:\d*0/|(\d+)/\1\])|.*(?:left out|unique pairs|warning|error)", re.IGNORECASE
)
log = logging.getLogger(__name__)


def prepare(run: Run, executor: Executor) -> Prepared:
    """Make the data of a run, or find existing data, and record it in the run's folder.

    Raises:
        UserError: for missing or unusable data.
    """
    job = _preparation(run, executor)
    require_source(job.settings, job.source)
    if corpus := _corpus_command(run, job.source):  # it does nothing if the corpus exists
        command_line = to_shell(corpus, executor.environment)
        log.info("$ %s", command_line)
        keep_command(command_line, run.folder / COMMANDS)
        executor.run(corpus, run.folder / "corpus.log", errors_too=True, on_line=show_corpus_line)
    prepared = job.run()
    is_made_here = prepared.folder.parent == job.root
    if not is_made_here:
        inputs = read_step_records(run.folder).get("train", {}).get("inputs") or {}
        sizes = size_digest(prepared.folder)
        if inputs.get("data") == sizes:  # recorded by 0.1.0
            prepared = dataclasses.replace(prepared, fingerprint=sizes)
    facts = {
        "folder": str(prepared.folder.resolve()),
        "sentences": prepared.sentences,
        "fingerprint": prepared.fingerprint,
        "source": str(job.source.resolve()) if job.source else None,
        "settings": selected(job.settings, job.settings if is_made_here else BINARISED_KEYS),
    }
    write_step_record(run.folder, "prepare", inputs={}, facts=facts)
    return prepared


def show_preparation(run: Run, executor: Executor) -> Prepared:
    """Show the commands of the stage and make nothing.

    Returns:
        The folder of the data, which need not exist.
    """
    job = _preparation(run, executor, unread=True)
    if job.settings["recipe"] == "binarised" or (job.source and is_binarised(job.source)):
        return Prepared(job.source or Path("DATA-BIN"), {}, "")
    if run.options.includes_stage("prepare"):
        steps = job.steps()
        corpus = _corpus_command(run, job.source)
        if corpus and job.source:
            steps.insert(0, Step("corpus", job.source, corpus))
        make(steps, job.root, executor=executor, dry_run=True, whole=run.options.prepare_command)
    folder = None
    if run.folder.exists() and not run.options.data:
        folder = prepared_data(run.folder)
    return Prepared(folder or job.root / "binarised", {}, "")


def load_prepared_data(run: Run) -> Prepared:
    """The data made by an earlier prepare stage.

    Raises:
        UserError: if there is none, or if the recipe now requires other data.
    """
    folder = run.folder
    facts = prepare_facts(folder)
    current = dataclasses.asdict(run.recipe.data)
    data = prepared_data(folder)
    if "sentences" not in facts or data is None:
        raise UserError(f"No prepared data in {folder}. Run --stage prepare first, or give --data.")
    settings = facts.get("settings", {})
    if "recipe" in settings:  # an earlier version recorded fewer keys
        settings = LATER | settings
    sentences = facts["sentences"]
    changed = changes(settings, selected(current, settings), "data.")
    differences = [f"{key}: {change}" for key, change in changed.items()]
    differences += [f"subset {name} is new" for name in run.recipe.splits if name not in sentences]
    if differences:
        raise UserError(
            f"The data of {folder} was prepared with other settings ({'; '.join(differences)}). Run --stage "
            "prepare with the new settings first."
        )
    return Prepared(data, sentences, facts["fingerprint"])


def _preparation(run: Run, executor: Executor, unread: bool = False) -> Preparation:
    """The preparation of a run's data; `unread` for one that only shows its commands."""
    options = run.options
    source = options.data
    if source is None and run.folder.exists():
        recorded = prepare_facts(run.folder).get("source")
        source = Path(recorded) if recorded else None
    if source is None and run.recipe.data.recipe in EMBEDDED:
        source = options.data_root / _CORPUS
    data = dataclasses.asdict(run.recipe.data)
    return Preparation(
        data,
        run.recipe.splits,
        source,
        prepared_folder(data, source, options.data_root),
        executor,
        downloads=options.data_root / "downloads",
        commands=run.folder / COMMANDS,
        whole=options.prepare_command,
        unread=unread,
    )


def _corpus_command(run: Run, source: Path | None) -> list[str]:
    """The command that makes the text of an embedded corpus; [] for the user's text."""
    if run.recipe.data.recipe in EMBEDDED and source == run.options.data_root / _CORPUS:
        return ["moa-fairseq", "corpus", "--output", str(source)]
    return []


def show_corpus_line(line: str) -> None:
    """Show a line of `moa-fairseq corpus` if it matches _SHOWN; the log of the command has all lines."""
    if _SHOWN.match(line):
        log.info("  %s", line)
