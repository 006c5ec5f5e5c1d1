"""result.json: one measured number with everything that is needed to trust or repeat it."""

from __future__ import annotations

import dataclasses
import datetime
import os
import subprocess
from pathlib import Path
from typing import Any, Dict, Optional

from moa_fairseq.data_prep.manifest import tool_versions
from moa_fairseq.evaluation.chains import CHAINS, DEFAULT_CHAINS
from moa_fairseq.json_files import is_number, write_json
from moa_fairseq.recipes.batch import plan_batch
from moa_fairseq.recipes.hardware import precision_name
from moa_fairseq.recipes.schema import HEADLINE_METRICS, Recipe, Score
from moa_fairseq.recipes.steps import Run
from moa_fairseq.recipes.train_log import summarise
from moa_fairseq.recipes.training import trained_as_the_recipe_says


def write_result(run: Run, scores: Dict[str, Dict[str, Any]], command: str) -> Path:
    """Write `result.json` into the run folder.

    scores: subset → what `moa-fairseq score --json` said; the recipe's first subset is the result, the
    others stand under "other_subsets". command: the moa-fairseq line that led to it.
    """
    recipe, trained = run.recipe, run.state.get("train")
    summary = summarise(run.folder / "train.jsonl")
    subset = recipe.subsets[0]
    # what the step that read the model remembers
    evaluated = run.state.get(f"{'generate' if recipe.generate else 'score'}-{subset}")
    settings = evaluated.get("settings", {})
    metrics = flat_metrics(scores[subset]) if subset in scores else {}
    metrics.update({key: summary.pop(key) for key in ("valid_ppl",) if key in summary})
    result = {
        "experiment": recipe.experiment,
        "reproduces": _reproduces(run, evaluated),
        "headline": recipe.score.headline if recipe.score else None,
        "metrics": metrics,
        "subset": subset,
        "other_subsets": {name: flat_metrics(values) for name, values in scores.items() if name != subset},
        "parameters": trained.get("parameters"),
        **({"updated_parameters": trained["updated"]} if trained.get("updated") is not None else {}),
        **summary,
        "effective_batch_tokens": recipe.train.effective_batch_tokens or recipe.train.max_tokens,
        "checkpoints_averaged": evaluated.get("checkpoints"),
        "generation": {key: settings.get(key) for key in ("beam", "lenpen")} if recipe.generate else None,
        "evaluation": scores.get(subset, {}).get("meta", {}).get("evaluation"),
        "seed": recipe.train.seed,
        "hardware": trained.get("hardware", run.hardware.describe()),
    }
    return _write(run.folder / "result.json", result, command)


def write_throughput(run: Run, path: Path, command: str) -> None:
    """Write how fast the train stage was, for --plan to go by."""
    from moa_fairseq.recipes.planner.plan import workload

    recipe, hardware, summary = run.recipe, run.hardware, summarise(run.folder / "train.jsonl")
    batch = plan_batch(recipe.train, hardware.devices)
    row = {
        "experiment": recipe.experiment,
        "hardware": run.state.get("train").get("hardware", hardware.describe()),
        "precision": precision_name(recipe.train.precision, hardware, recipe.model),
        "tokens_per_second": summary["tokens_per_second"],
        "macs_per_target_token": round(workload(recipe, run.data).macs_per_target_token),
        "parameters": run.state.get("train").get("parameters"),
        "max_tokens": batch.max_tokens,
        "update_freq": batch.update_freq,
        "updates": summary["updates"],
    }
    _write(path, row, command)


def _write(path: Path, values: Dict[str, Any], command: str) -> Path:
    """Write `values` as JSON, and what made them: versions, commit, date, the moa-fairseq line."""
    made_by = {"versions": versions(), "commit": commit(), "date": datetime.date.today().isoformat()}
    write_json(path, {**values, **made_by, "command": command})
    return path


def flat_metrics(scores: Dict[str, Any]) -> Dict[str, Any]:
    """{'multi_bleu': {'score': x, ...}, ...} → {'multi_bleu': x, ..., 'sacrebleu_signature': '...'}."""
    metrics = {name: scores[name]["score"] for name in HEADLINE_METRICS if name in scores}
    spreads = {f"{name}_sd": scores[name].get("sd") for name in metrics}
    # JSON knows neither infinity nor NaN, which a diverged model scores.
    metrics = {name: value if is_number(value) else None for name, value in metrics.items()}
    metrics.update({name: sd for name, sd in spreads.items() if is_number(sd)})
    signature = scores.get("sacrebleu", {}).get("signature") or scores.get("sacrebleu_signature")
    if signature:
        metrics["sacrebleu_signature"] = signature
    return metrics


def describe(recipe: Recipe, scores: Dict[str, Dict[str, Any]], reproduces: Optional[Dict[str, Any]]) -> str:
    """The scores in one line: of each subset the headline and what was asked for beside the usual chains.

    reproduces: the paper's cell, where the run stands for it: its number is named, too.
    """
    names = [CHAINS[name].key for name in CHAINS if name not in DEFAULT_CHAINS]
    names.insert(0, (recipe.score or Score()).headline)
    parts = []
    for subset, values in scores.items():
        found = [f"{name} {values[name]['score']:.2f}" for name in dict.fromkeys(names) if name in values]
        parts.append(f"{', '.join(found)} on {subset}" if found else f"{subset} scored")
    paper = (reproduces or {}).get("value")
    return ", ".join(parts) + (f"; the paper prints {paper}" if paper is not None else "")


def versions() -> Dict[str, Optional[str]]:
    """Versions of Python and of the packages that the numbers depend on."""
    found = tool_versions()
    fairseq = found.get("ve-fairseq") or found.get("fairseq")
    return {**{name: found.get(name) for name in ("python", "torch", "moa_fairseq")}, "fairseq": fairseq}


def commit() -> Optional[str]:
    """The commit of the source tree that runs, with -dirty for uncommitted changes.

    Outside of git it is what $MOA_FAIRSEQ_COMMIT says of the copy, else None.
    """
    here = Path(__file__).resolve().parent
    try:
        head, status = (
            subprocess.run(
                ["git", "-C", str(here), *words], capture_output=True, text=True, timeout=20, check=True
            )
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("MOA_FAIRSEQ_COMMIT") or None
    return head.stdout.strip() + ("-dirty" if status.stdout.strip() else "")


def _reproduces(run: Run, evaluated: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """The paper's cell, if the finished training's model was evaluated with the recipe's own settings."""
    recipe, section = run.recipe, run.recipe.generate or run.recipe.score
    if recipe.reproduces is None or section is None or not trained_as_the_recipe_says(run):
        return None
    stands = (
        evaluated.get("training") == run.state.get("train")["done"]
        and evaluated.get("checkpoints") == (recipe.average.count if recipe.average else 1)
        and evaluated.get("settings") == dataclasses.asdict(section)
    )
    return dataclasses.asdict(recipe.reproduces) if stands else None
