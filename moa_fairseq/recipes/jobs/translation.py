"""A translation: beam search and BLEU."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from typing import Any, List

from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.chains import CHAINS, DEFAULT_CHAINS
from moa_fairseq.recipes.jobs.shared import score_step
from moa_fairseq.recipes.steps import Run, Step, stamp
from moa_fairseq.running.command_line import REDIRECT, flags, positional

log = logging.getLogger(__name__)


def evaluation(run: Run) -> List[Step]:
    """The translation of each subset, then its scores."""
    scored = run.recipe.subsets if run.recipe.score else []
    return [*(_generation(run, subset) for subset in run.recipe.subsets), *(_score(run, s) for s in scored)]


def _generation(run: Run, subset: str) -> Step:
    """The beam search, in fp32 so that scores do not depend on the hardware."""
    section, name = run.recipe.generate, f"generate-{subset}"
    output, captured = run.folder / f"{name}.txt", run.folder / f"{name}.partial"
    values = {
        **run.task_flags(),
        "path": str(run.model),
        "gen-subset": subset,
        "beam": section.beam,
        "lenpen": section.lenpen,
        "max-tokens": section.max_tokens,
        "remove-bpe": section.remove_bpe,
        **section.flags,
    }
    translated, total = 0, run.prepared.sentences.get(subset) if run.prepared else None
    pace, goal = max(100, (total or 1000) // 10), f" of {total:,}" if total else ""

    def watch(line: str) -> None:
        nonlocal translated
        if re.match(r"H-\d+\t", line):
            translated += 1
            if translated % pace == 0:
                log.info("  %s%s sentences", f"{translated:,}", goal)

    def finish() -> None:
        if not translated:
            raise UserError(
                f"fairseq-generate translated nothing of subset {subset}; see {run.log(name)} and {captured}."
            )
        os.replace(captured, output)

    command = ["fairseq-generate", positional(run.data), *flags(values), *run.device_flags()]
    return Step(
        name,
        "generate",
        [*command, REDIRECT, str(output)],
        output=output,
        captured=captured,
        watch=watch,
        finish=finish,
        **run.of_the_model(section, subset),
    )


def _score(run: Run, subset: str) -> Step:
    """The scoring of the translations, by the headline's chain, too."""
    section, translations = run.recipe.score, run.folder / f"generate-{subset}.txt"
    further = [name for name in CHAINS if name not in DEFAULT_CHAINS]
    headline = next((name for name in further if CHAINS[name].key == section.headline), None)
    values = {"target-lang": run.recipe.data.target, "also": headline, **section.flags, "json": True}

    def inputs() -> List[Any]:
        if not translations.is_file():
            raise UserError(f"{translations} is missing: run --stage generate first (or --stage all).")
        return [stamp(translations), dataclasses.asdict(section)]

    command = ["moa-fairseq", "score", positional(translations), *flags(values)]
    return score_step(run, subset, command, inputs=inputs)
