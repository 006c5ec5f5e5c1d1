"""Zero-shot accuracy of a causal language model, by lm-evaluation-harness (lm_eval).

  moa-fairseq zero-shot runs/wikitext103_lm_switchhead_47m --tasks lambada_openai,blimp,cbt
  moa-fairseq zero-shot RUN --tasks my_task --include-path my_tasks --limit 100

The run's own segmentation applies to the text: SentencePiece's pieces, bytes, or words between spaces. A
word or letter that the dictionary lacks is <unk>, and counted. An answer with <unk> has the probability of
<unk>, and never counts as the likeliest text.

All numbers go into RUN/zero_shot.json, and the accuracies of SwitchHead's tables into the metrics of
RUN/result.json for `moa-fairseq compare`. After an interruption the same command resumes, with
the answers saved in ~/.cache/moa_fairseq/zero-shot until it ends.

lm_eval is not installed with this project: pip install '.[zero-shot]', or bash scripts/setup.sh --zero-shot.
It fetches a task's data from Hugging Face's hub. cbt, the Children's Book Test, is a task of this package.
Task files can run code (`!function`): give --include-path only a folder that you trust.
"""

import argparse
import hashlib
import json
import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError, did_you_mean
from moa_fairseq.experiments.data.catalogue import LANGUAGE_MODELING
from moa_fairseq.experiments.inference import text_model
from moa_fairseq.experiments.recipes.checkpoints import checkpoint_and_data
from moa_fairseq.experiments.records.json_files import Values, is_number, read_json, write_json
from moa_fairseq.experiments.records.provenance import provenance
from moa_fairseq.experiments.scoring.trained_model import shortened
from moa_fairseq.experiments.scoring.zero_shot import OUTPUT, require_lm_eval, result_of
from moa_fairseq.experiments.tables import Column, Table, page
from moa_fairseq.files import (
    DISK_FULL,
    as_user_error,
    checksum,
    private_folder,
    refuse_overwriting,
    user_cache,
)

TASKS = Path(__file__).parent / "zero_shot_tasks"
_BOOTSTRAP = 1000  # number of bootstrap samples for the standard error of a perplexity
_REMEDY = "A recipe should have written it. Restore it, or give a checkpoint instead of the run."
_TEXT_PROBLEMS = {  # counts of `HarnessModel.text_facts`
    "unknown_targets": "answers have a word or letter that the dictionary lacks",
    "cut": "contexts are longer than the model reads; the beginning is left out",
}
log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq zero-shot`."""
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="run folder, or checkpoint with --data")
    add(
        "--tasks",
        required=True,
        metavar="NAMES",
        help="lm_eval's tasks or groups, separated by commas",
    )
    add(
        "--include-path",
        type=Path,
        metavar="DIR",
        help="folder with your own task files (YAML); `!function` in them runs code",
    )
    add(
        "--limit",
        type=int,
        metavar="N",
        help="number of documents per task, for a trial (default: all)",
    )
    add("--max-tokens", type=int, default=4096, metavar="N", help="symbols per batch (4096)")
    add("--output", type=Path, metavar="FILE.json", help=f"output file (RUN/{OUTPUT})")
    text_model.add_reading(parser)
    add("--json", action="store_true", help="print the file's content instead of a table")
    parser.set_defaults(file=None)


def run(args: argparse.Namespace) -> int:
    """Evaluate the model, write and print the results, and return the exit status."""
    for flag, value in (("--limit", args.limit), ("--max-tokens", args.max_tokens)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value} is less than 1.")
    names = list(dict.fromkeys(name.strip() for name in args.tasks.split(",") if name.strip()))
    manager = _task_manager(names, args.include_path)
    # It imports lm_eval, without which `_task_manager` raises a UserError
    from moa_fairseq.experiments.inference.harness import HarnessModel

    folder = args.run_dir if args.run_dir.is_dir() else args.run_dir.parent
    output = args.output or folder / OUTPUT
    refuse_overwriting(output, [args.run_dir, folder / "result.json"], "--output")
    model = text_model.load(args, LANGUAGE_MODELING)
    checkpoint, _ = checkpoint_and_data(args.run_dir, args.data)
    digest = checksum(checkpoint)
    made_by = provenance()
    # Saved answers are used again only if all of these are the same
    saved_answers = _answers_path(
        f"{digest} {model.cfg.task.data} {args.segmented} {made_by['commit']} {output.absolute()}"
    )
    log.info(f"{checkpoint}: {', '.join(names)} on {model.device}")
    harness = HarnessModel(model, args.max_tokens)
    try:
        results = _evaluate(harness, names, manager, args.limit, saved_answers)
    except OSError as error:  # a full disk, or no connection to Hugging Face's hub
        if error.errno in DISK_FULL:
            raise as_user_error(error, output) from error
        raise UserError(
            f"--tasks {args.tasks}: cannot read a task's data ({shortened(error)}). lm_eval fetches it "
            "from Hugging Face's hub: go online once, or give --include-path a task file of local data."
        ) from error
    origin = {"checkpoint": str(checkpoint), "checkpoint_sha256": digest}
    record: Values = origin | _evaluation(args, harness, results)
    command = shlex.join(["moa-fairseq", *sys.argv[1:]])
    write_json(output, record | made_by | {"command": command})
    for part in saved_answers.parent.glob(f"{saved_answers.name}_rank*"):
        part.unlink()
    _add_to_result(args.run_dir, record)
    if args.json:
        print(json.dumps(read_json(output, ""), indent=1, ensure_ascii=False))
    else:
        _warn_of_text(record["tasks"])
        print(_table_text(record), end="")
    log.info(f"wrote {output}")
    return 0


def _task_manager(names: list[str], include_path: Path | None) -> Any:
    """The index of tasks; lm_eval's own tasks, which take ten seconds, are read only if one is named.

    Raises:
        UserError: if lm_eval is not installed, for a folder that does not exist, and for unknown tasks.
    """
    require_lm_eval("zero-shot")
    from lm_eval.tasks import TaskManager

    if include_path is not None and not include_path.is_dir():
        raise UserError(
            f"--include-path {include_path} is not a folder. Give the folder of the task files."
        )
    if not names:
        raise UserError("--tasks is empty. Give names separated by commas, such as blimp,cbt.")
    folders = [str(folder) for folder in (TASKS, include_path) if folder is not None]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folders)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(
                f"--tasks {name}: neither lm_eval nor --include-path has a task or group of that name"
                f"{did_you_mean(name, manager.all_tasks)}."
            )
    return manager


def _answers_path(conditions: str) -> Path:
    """The path with which the files of lm_eval's saved answers begin.

    lm_eval unpickles the answers, so they are in a private folder, not in the run folder.
    """
    key = hashlib.sha256(conditions.encode()).hexdigest()
    return private_folder(user_cache() / "zero-shot") / key


def _evaluate(
    harness: Any, names: list[str], manager: Any, limit: int | None, saved_answers: Path
) -> Values:
    """lm_eval's results for tasks."""
    from lm_eval.evaluator import simple_evaluate

    results = simple_evaluate(
        model=harness,
        tasks=names,
        task_manager=manager,
        limit=limit,
        use_cache=str(saved_answers),
        bootstrap_iters=_BOOTSTRAP,
    )
    assert results is not None  # lm_eval returns None only in processes other than the first
    return dict(results)


def _evaluation(args: argparse.Namespace, harness: Any, results: Values) -> Values:
    """The settings and the results of an evaluation, as its file has them."""
    return {
        "run": args.run_dir.name,
        "data": str(harness.text_model.cfg.task.data),
        "lm_eval": results["lm_eval_version"],
        "limit": args.limit,
        "segmented": args.segmented,
        "tokens_per_sample": harness.chunk_length,
        "carried_chunks": harness.network.decoder.context.chunks if harness.carries_context else 0,
        "device": str(harness.text_model.device),
        "bootstrap_draws": _BOOTSTRAP,
        "tasks": {name: _task_results(name, results, harness) for name in results["results"]},
    }


def _task_results(name: str, results: Values, harness: Any) -> Values:
    """lm_eval's results for a task or group; for a task also the number of documents and `text_facts`."""
    task: Values = {"version": results["versions"].get(name), "metrics": {}}
    for key, value in results["results"][name].items():
        metric = key.removesuffix(",none")
        if is_number(value) and metric != "sample_len":
            task["metrics"][metric] = value
    if name not in results["samples"]:
        task["tasks"] = results["group_subtasks"].get(name, [])
        return task
    # A document has a sample for each of lm_eval's filters, with the same requests
    documents = {sample["doc_id"]: sample for sample in results["samples"][name]}
    requests: list[tuple[str, str]] = []
    for sample in documents.values():
        requests += map(tuple, sample["arguments"])
    sizes = results["n-samples"][name]
    return task | {
        "shots": results["n-shot"].get(name),
        "documents": sizes["effective"],
        "of": sizes["original"],
        "text": harness.text_facts(requests),
    }


def _add_to_result(run_dir: Path, record: Values) -> None:
    """Add the accuracies of whole tasks to the metrics of a run's result.json, if it has one."""
    path = run_dir / "result.json"
    new, settings = result_of(record)
    if not new or not path.is_file():
        return
    result = read_json(path, _REMEDY)
    if not isinstance(result, dict) or not isinstance(result.get("metrics"), dict):
        raise UserError(f"{path} has no metrics. {_REMEDY}")
    result["metrics"].update(new)
    result["zero_shot"] = settings
    write_json(path, result)
    accuracies = ", ".join(f"{name} {value:.1f}" for name, value in new.items())
    log.info(f"{path}: {accuracies}")


def _warn_of_text(tasks: Values) -> None:
    """Warn of tasks with unknown words in their answers, and of tasks with contexts that were cut."""
    for name, task in tasks.items():
        text = task.get("text", {})
        for count, problem in _TEXT_PROBLEMS.items():
            if text.get(count):
                log.warning(f"{name}: {text[count]:,} of {text['requests']:,} {problem}")


def _table_text(record: Values) -> str:
    """The metrics of all tasks as a table, with the settings below it."""
    columns = [
        Column("task", "Task", once=True),
        Column("metric", "Metric"),
        Column("value", "Value", ">"),
        Column("error", "±", ">"),
        Column("documents", "Documents", ">"),
        Column("unknown", "unknown", ">"),
    ]
    lines = []
    for name, task in record["tasks"].items():
        for metric, value in task["metrics"].items():
            if metric.endswith("_stderr"):
                continue
            error = task["metrics"].get(f"{metric}_stderr")
            line = {"task": name, "metric": metric, "value": f"{value:.4f}"}
            if error is not None:
                line["error"] = f"{error:.4f}"
            if text := task.get("text"):
                line["documents"] = f"{task['documents']:,}"
                line["unknown"] = f"{text['unknown'] / max(1, text['symbols']):.2%}"
            lines.append(line)
    limit = f"limit {record['limit']} (for a trial only), " if record["limit"] else ""
    settings = (
        f"lm_eval {record['lm_eval']}, {limit}{record['tokens_per_sample']} symbols a chunk, "
        f"{record['carried_chunks']} carried chunks."
    )
    return page([Table(columns, lines), settings], markdown=False)
