"""The rules that tie the keys of a recipe together, each with an error that names file and key."""

from __future__ import annotations

import ast
import re
import reprlib
from pathlib import Path
from typing import Any, Iterator, NoReturn, Tuple

from moa_fairseq.data_prep.catalogue import datasets
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.schema import (
    CAUSAL_LM,
    CLASSIFICATION,
    DATA_RECIPES,
    FINETUNING,
    HEADLINE_METRICS,
    KINDS,
    MASKED_LM,
    PRECISIONS,
    TRANSLATION,
    Generate,
    Model,
    Recipe,
    Train,
)
from moa_fairseq.running.command_line import unsafe_value

# Models that are scored straight from their checkpoints: the beginning of their headline metrics, their name.
_SCORED = {
    MASKED_LM: ("masked_lm_", "a masked language model"),
    CAUSAL_LM: ("lm_", "a causal language model"),
    CLASSIFICATION: ("accuracy", "a classifier"),
}
# What no section may set: recipes are passed on, and the reader of one expects its run folder to be written.
REFUSED = (
    *("post-save-script", "use-plasma-view", "plasma-path"),
    *("log-file", "results-path", "save-predictions", "checkpoint-suffix", "aim-repo"),
)
# What the runner sets itself, and for whole sections: what their keys say.
OWN = (
    *("user-dir", "save-dir", "destdir", "path", "gen-subset", "subset", "data", "json", "masked-lm"),
    *("classifier", "cpu", "log-format", "no-progress-bar", "update-freq", "fp16", "bf16", "amp"),
    *("device-id", "joined-dictionary", "source-lang", "target-lang"),
    *(f"distributed-{x}" for x in ("world-size", "rank", "init-method", "port", "no-spawn", "num-procs")),
)
_KEYS = {"model": (Model, Train), "train": (Model, Train), "generate": (Generate,)}
_INSTEAD = {
    **dict.fromkeys(("fp16", "bf16", "amp"), "say train.precision"),
    "update-freq": "it follows from train.effective_batch_tokens",
    "gen-subset": "say generate.subsets",
    "subset": "say score.subsets",
}
LARGEST = 2**63 - 1  # what fits into the whole numbers of torch
SECTIONS = ("data", "model", "train", "generate", "score")
FLAG_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
FILE_NAME = re.compile(r"\w[\w.-]*")  # what stands in the names of files: a language, a subset
Problems = Iterator[Tuple[str, str]]  # of key and problem


def check(recipe: Recipe, file: str) -> None:
    """Raise UserError naming file and key where two keys contradict each other."""
    for rule in (_values, _average, _kind, _finetuning, _flags):
        for key, problem in rule(recipe):
            fail(file, key, problem)


def fail(file: str, key: str, problem: str) -> NoReturn:
    """Raise the UserError for one key of one file."""
    raise UserError(f"{file}: {key if len(key) <= 100 else key[:97] + '...'}: {problem}")


def reserved(section: str, flag: str) -> str:
    """Why a section's free flags must not hold this one; "" if they may."""
    flag = flag.replace("_", "-")
    if flag in REFUSED:
        return (
            "fairseq would run a program for it, or write outside of the run folder, which a recipe must not "
            "decide: leave it out."
        )
    kinds = _KEYS.get(section, ())
    owner = next((kind for kind in kinds if flag.replace("-", "_") in kind.__dataclass_fields__), None)
    if flag not in OWN and not owner:
        return ""
    instead = f"say {owner.__name__.lower()}.{flag.replace('-', '_')}" if owner else "the runner sets it"
    return f"is not a free flag; {_INSTEAD.get(flag, instead)}."


def _values(recipe: Recipe) -> Problems:
    data = recipe.data
    for key, value, allowed in (
        ("data.recipe", data.recipe, DATA_RECIPES),
        ("train.precision", recipe.train.precision, PRECISIONS),
        ("score.headline", recipe.score.headline if recipe.score else None, (*HEADLINE_METRICS, None)),
    ):
        if value not in allowed:
            yield key, f"{reprlib.repr(value)} is not one of {', '.join(c for c in allowed if c)}."
    if not re.fullmatch(r"[a-z0-9_]+", recipe.experiment):
        yield "experiment", "use lower-case letters, digits and underscores only (it names folders)."
    for section in ("data", "model", "train", "average", "generate"):
        values = getattr(recipe, section)
        for name, value in vars(values).items() if values else ():
            if isinstance(value, int) and not isinstance(value, bool):
                if abs(value) > LARGEST:
                    yield f"{section}.{name}", f"must not be above {LARGEST:,}."
                if value < 1 and name != "seed":
                    yield f"{section}.{name}", f"must be at least 1, not {value}."
    names = [("data.source", data.source), ("data.target", data.target)]
    for section in ("generate", "score"):
        names += [(f"{section}.subsets", name) for name in getattr(getattr(recipe, section), "subsets", ())]
    for key, name in names:
        if name in ("True", "False"):
            yield key, "must be text: put it in quotes, as YAML takes no, yes, on and off for a truth value."
        if name is not None and not (isinstance(name, str) and FILE_NAME.fullmatch(name)):
            yield (
                key,
                f"{reprlib.repr(name)} is not a name: use letters, digits, '_', '-' and '.' (files bear it).",
            )
    if recipe.model.share_all_embeddings and not data.joined_dictionary:
        yield (
            "model.share_all_embeddings",
            "one embedding for both languages needs one dictionary for both: "
            "set data.joined_dictionary: true, or model.share_all_embeddings: false.",
        )
    if data.bpe and data.codes:
        yield "data.codes", "the merges are learned (data.bpe) or given (data.codes), not both."
    if data.train_fraction is not None and not 0 < data.train_fraction <= 1:
        yield "data.train_fraction", f"must lie above 0 and not above 1, not {data.train_fraction}."
    if recipe.train.max_epoch is None and recipe.train.max_update is None:
        yield "train.max_epoch", "is missing: say max_epoch or max_update, or training never ends."
    if recipe.generate and not recipe.generate.subsets:
        yield "generate.subsets", "is empty: name at least one subset, such as [test]."


def _average(recipe: Recipe) -> Problems:
    average, train = recipe.average, recipe.train
    if average is None:
        return
    epochs, updates = average.epochs, average.updates
    if (epochs is None) == (updates is None):
        yield "average.epochs", "say either average.epochs or average.updates."
    if average.count < 2:
        yield (
            f"average.{'epochs' if epochs else 'updates'}",
            "an average of one checkpoint is no average: "
            "use 2 or more, or average: null to evaluate the best checkpoint.",
        )
    cannot = f"cannot average {epochs} epochs"
    if epochs and epochs > train.keep_last_epochs:
        yield "average.epochs", f"{cannot} when train.keep_last_epochs keeps {train.keep_last_epochs}."
    if epochs and train.max_epoch and epochs > train.max_epoch:
        yield "average.epochs", f"{cannot} of the {train.max_epoch} that train.max_epoch allows."
    kept: Any = train.flags.get("keep-interval-updates", updates)
    if updates and ("save-interval-updates" not in train.flags or 0 <= kept < updates):
        yield (
            "average.updates",
            "needs train.flags.save-interval-updates, and keep-interval-updates must not be below "
            f"{updates}.",
        )


def _kind(recipe: Recipe) -> Problems:
    """What a translation needs and other models have no use for, and the other way round."""
    data, score, task = recipe.data, recipe.score, recipe.train.task
    kinds = (TRANSLATION, *KINDS)
    if not task.startswith(kinds):
        yield (
            "train.task",
            f"{reprlib.repr(task)} is not a task of recipes: its name, also that of a task of your own, "
            f"must begin with {', '.join(kinds[:-1])} or {kinds[-1]}. Use fairseq-train for others.",
        )
    if data.recipe != "binarised" and datasets()[data.recipe].kind != recipe.kind:
        yield "data.recipe", f"{data.recipe!r} makes no data for train.task {task!r}."
    metrics, name = _SCORED.get(recipe.kind, (tuple(beginning for beginning, _ in _SCORED.values()), ""))
    if score and score.headline.startswith(metrics) != bool(name):
        yield "score.headline", f"{score.headline!r} is no score of train.task {task!r}."
    if name:
        keys = ("source", "target", "bpe", "lowercase", "codes", "train_fraction")
        unused = {f"data.{key}": getattr(data, key) for key in keys}
        for key, value in {**unused, "generate": recipe.generate}.items():
            if value:
                yield key, f"has no meaning for {name}: leave it out."
        if score and not score.subsets:
            yield "score.subsets", "is empty: name at least one subset, such as [test]."
        return
    for key in ("source", "target"):
        if getattr(data, key) is None:
            yield f"data.{key}", "is missing: name the language, such as en."
    if data.source == data.target:
        yield "data.target", f"source and target are both {data.source!r}."
    if score and not recipe.generate:
        yield "score", "needs a generate section."
    if score and score.subsets:
        yield "score.subsets", "say generate.subsets."


def _finetuning(recipe: Recipe) -> Problems:
    method, task = recipe.finetune, recipe.train.task
    if (recipe.pretrained is None) != (method is None):
        yield (
            "finetune" if method is None else "pretrained",
            "is missing: `pretrained` names the model and `finetune` says how it is fine-tuned.",
        )
    if method is not None and method not in FINETUNING:
        yield "finetune", f"{method!r} is not one of {', '.join(FINETUNING)}."
    if method is not None and not (task.endswith("_bcd") and recipe.kind == TRANSLATION):
        yield "finetune", f"needs train.task translation_bcd, not {task}."


def _flags(recipe: Recipe) -> Problems:
    """What holds of any flag; moa_fairseq.recipes.flags asks the programs about their own."""
    for section in SECTIONS:
        values = getattr(recipe, section)
        for name, value in values.flags.items() if values else ():
            key = f"{section}.flags.{name}"
            if not FLAG_NAME.fullmatch(name):
                proper = name[:100].lower().replace("_", "-").lstrip("-")
                yield key, f"write flags as on the command line, without the leading dashes: {proper}."
            if value is not None and (why := reserved(section, name)):
                yield key, why
            if name == "model-overrides" and not _is_dictionary(value):
                yield (
                    key,
                    f"{reprlib.repr(value)} is not a dictionary, such as \"{{'dropout': 0}}\".",
                )
            if name == "tensorboard-logdir" and not _is_inside(value):
                yield key, f"{reprlib.repr(value)} is not a folder inside of the run folder, such as logs."
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, int) and abs(item) > LARGEST:
                    yield key, f"must not be above {LARGEST:,}."
                if not isinstance(item, (str, int, float, type(None))):  # and bool, which is an int
                    yield (
                        key,
                        "a flag's value is text, a number, true, false, null or a flat list of these, not "
                        f"{reprlib.repr(item)}.",
                    )
            problem = unsafe_value(value)
            if problem:
                yield key, problem


def _is_dictionary(text: Any) -> bool:
    try:
        return isinstance(ast.literal_eval(text), dict)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _is_inside(path: Any) -> bool:
    return isinstance(path, str) and not Path(path).is_absolute() and ".." not in Path(path).parts
