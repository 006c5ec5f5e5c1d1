"""The rules that tie the keys of a recipe together, each with an error that names file and key."""

from __future__ import annotations

import dataclasses
import re
import reprlib
from typing import Dict

from moa_fairseq.data_prep import catalogue
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.schema import (
    CAUSAL_LM,
    CLASSIFICATION,
    DATA_RECIPES,
    FINETUNING,
    HEADLINE_METRICS,
    LM_DATA,
    MASKED_LM,
    PRECISIONS,
    TRANSLATION,
    Average,
    Recipe,
    Train,
)
from moa_fairseq.running.command_line import smuggled

# The beginning of the headline metrics of each kind of model that is scored straight from its checkpoint.
_HEADLINES = {MASKED_LM: "masked_lm_", CAUSAL_LM: "lm_", CLASSIFICATION: "accuracy"}
_NAMES = {
    MASKED_LM: "a masked language model",
    CAUSAL_LM: "a causal language model",
    CLASSIFICATION: "a classifier",
}
LARGEST = 2**63 - 1  # what fits into the whole numbers of torch
FLAG_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def check(recipe: Recipe, file: str) -> None:
    """Raise UserError naming file and key where two keys contradict each other."""
    for rule in (
        _check_choices,
        _check_positive,
        _check_experts,
        _check_embeddings,
        _check_length,
        _check_kind,
        _check_data,
        _check_finetuning,
        _check_flags,
    ):
        rule(recipe, file)


def fail(file: str, key: str, problem: str) -> None:
    """Raise the UserError for one key of one file."""
    raise UserError(f"{file}: {key if len(key) <= 100 else key[:97] + '...'}: {problem}")


def _check_choices(recipe: Recipe, file: str) -> None:
    choices = [
        ("data.recipe", recipe.data.recipe, DATA_RECIPES),
        ("train.precision", recipe.train.precision, PRECISIONS),
        ("score.headline", recipe.score.headline if recipe.score else None, (*HEADLINE_METRICS, None)),
    ]
    for key, value, allowed in choices:
        if value not in allowed:
            fail(file, key, f"{reprlib.repr(value)} is not one of {', '.join(c for c in allowed if c)}.")
    if not re.fullmatch(r"[a-z0-9_]+", recipe.experiment):
        fail(file, "experiment", "use lower-case letters, digits and underscores only (it names folders).")


def _check_positive(recipe: Recipe, file: str) -> None:
    for section in ("data", "model", "train", "average", "generate"):
        values = getattr(recipe, section)
        for field in dataclasses.fields(values) if values else ():
            value = getattr(values, field.name)
            whole = isinstance(value, int) and not isinstance(value, bool) and field.name != "seed"
            if whole and value < 1:
                fail(file, f"{section}.{field.name}", f"must be at least 1, not {value}.")
            if whole and value > LARGEST:
                fail(file, f"{section}.{field.name}", f"must not be above {LARGEST:,}.")


def _check_experts(recipe: Recipe, file: str) -> None:
    model = recipe.model
    if model.arch.startswith("moh_"):  # the number of heads is a flag of fairseq's: the model compares
        return
    sizes = {name: getattr(model, name) for name in ("num_experts", "experts_per_token", "expert_dim")}
    missing = [name for name, value in sizes.items() if value is None]
    if missing and (len(missing) < len(sizes) or model.arch.startswith("moa_")):
        fail(
            file,
            f"model.{missing[0]}",
            f"is missing: arch {model.arch} needs num_experts (E), experts_per_token (K) and expert_dim (D).",
        )
    if not missing and model.experts_per_token > model.num_experts:
        fail(
            file,
            "model.experts_per_token",
            f"K = {model.experts_per_token} experts per token cannot be chosen "
            f"from E = {model.num_experts} (model.num_experts): lower K or raise E.",
        )


def _check_embeddings(recipe: Recipe, file: str) -> None:
    if recipe.model.share_all_embeddings and not recipe.data.joined_dictionary:
        fail(
            file,
            "model.share_all_embeddings",
            "one embedding for both languages needs one dictionary for both: "
            "set data.joined_dictionary: true, or model.share_all_embeddings: false.",
        )


def _check_length(recipe: Recipe, file: str) -> None:
    train, average = recipe.train, recipe.average
    if train.max_epoch is None and train.max_update is None:
        fail(file, "train.max_epoch", "is missing: say max_epoch or max_update, or training never ends.")
    if average:
        _check_average(average, train, file)
    if recipe.generate and not recipe.generate.subsets:
        fail(file, "generate.subsets", "is empty: name at least one subset, such as [test].")


def _check_kind(recipe: Recipe, file: str) -> None:
    """What a translation needs and a language model has no use for, and the other way round."""
    data, score, task = recipe.data, recipe.score, recipe.train.task
    wanted = {
        MASKED_LM: tuple(catalogue.of_kind(catalogue.MASKED_LM)),
        CAUSAL_LM: LM_DATA,
        CLASSIFICATION: tuple(catalogue.of_kind(catalogue.CLASSIFICATION)),
        TRANSLATION: tuple(catalogue.of_kind(catalogue.TRANSLATION)),
    }
    if data.recipe not in (*wanted[recipe.kind], "binarised"):
        fail(file, "data.recipe", f"{data.recipe!r} makes no data for train.task {task!r}.")
    if score and not _suits(score.headline, recipe.kind):
        fail(file, "score.headline", f"{score.headline!r} is no score of train.task {task!r}.")
    if recipe.kind == TRANSLATION:
        _check_translation(recipe, file)
    else:
        _check_scored_model(recipe, file)


def _check_data(recipe: Recipe, file: str) -> None:
    data = recipe.data
    if data.bpe and data.codes:
        fail(file, "data.codes", "the merges are learned (data.bpe) or given (data.codes), not both.")
    if data.train_fraction is not None and not 0 < data.train_fraction <= 1:
        fail(file, "data.train_fraction", f"must lie above 0 and not above 1, not {data.train_fraction}.")


def _check_finetuning(recipe: Recipe, file: str) -> None:
    if (recipe.pretrained is None) != (recipe.finetune is None):
        fail(
            file,
            "finetune" if recipe.finetune is None else "pretrained",
            "is missing: `pretrained` names the model and `finetune` says how it is fine-tuned.",
        )
    if recipe.finetune is None:
        return
    if recipe.finetune not in FINETUNING:
        fail(file, "finetune", f"{recipe.finetune!r} is not one of {', '.join(FINETUNING)}.")
    if not recipe.train.task.endswith("_bcd") or recipe.kind != TRANSLATION:
        fail(file, "finetune", f"needs train.task translation_bcd, not {recipe.train.task}.")


def _suits(headline: str, kind: str) -> bool:
    if kind == TRANSLATION:
        return not headline.startswith(tuple(_HEADLINES.values()))
    return headline.startswith(_HEADLINES[kind])


def _check_scored_model(recipe: Recipe, file: str) -> None:
    data = recipe.data
    unused = {"data.source": data.source, "data.target": data.target, "data.bpe": data.bpe}
    unused.update({"data.lowercase": data.lowercase, "generate": recipe.generate})
    unused.update({"data.codes": data.codes, "data.train_fraction": data.train_fraction})
    for key, value in unused.items():
        if value:
            fail(file, key, f"has no meaning for {_NAMES[recipe.kind]}: leave it out.")
    if recipe.score and not recipe.score.subsets:
        fail(file, "score.subsets", "is empty: name at least one subset, such as [test].")


def _check_translation(recipe: Recipe, file: str) -> None:
    data, score = recipe.data, recipe.score
    for key in ("source", "target"):
        if getattr(data, key) is None:
            fail(file, f"data.{key}", "is missing: name the language, such as en.")
    if data.source == data.target:
        fail(file, "data.target", f"source and target are both {data.source!r}.")
    if score and not recipe.generate:
        fail(file, "score", "needs a generate section.")
    if score and score.subsets:
        fail(file, "score.subsets", "say generate.subsets.")


def _check_average(average: Average, train: Train, file: str) -> None:
    if (average.epochs is None) == (average.updates is None):
        fail(file, "average.epochs", "say either average.epochs or average.updates.")
    if average.count < 2:
        fail(
            file,
            f"average.{'epochs' if average.epochs else 'updates'}",
            "an average of one checkpoint is no average: "
            "use 2 or more, or average: null to evaluate the best checkpoint.",
        )
    if average.epochs and average.epochs > train.keep_last_epochs:
        fail(
            file,
            "average.epochs",
            f"cannot average {average.epochs} epochs when train.keep_last_epochs keeps "
            f"{train.keep_last_epochs}.",
        )
    if average.epochs and train.max_epoch and average.epochs > train.max_epoch:
        fail(
            file,
            "average.epochs",
            f"cannot average {average.epochs} epochs of the {train.max_epoch} that train.max_epoch allows.",
        )
    kept = train.flags.get("keep-interval-updates", average.updates)
    if average.updates and ("save-interval-updates" not in train.flags or 0 <= kept < average.updates):
        fail(
            file,
            "average.updates",
            "needs train.flags.save-interval-updates, and keep-interval-updates must not be "
            f"below {average.updates}.",
        )


def _check_flags(recipe: Recipe, file: str) -> None:
    reserved = _reserved_flags()
    for section in ("data", "model", "train", "generate", "score"):
        values = getattr(recipe, section)
        for name, value in values.flags.items() if values else ():
            key = f"{section}.flags.{name}"
            if not isinstance(name, str) or not FLAG_NAME.fullmatch(name):
                fail(
                    file,
                    key,
                    "write flags as on the command line, without the leading dashes: "
                    f"{str(name)[:100].lower().replace('_', '-').lstrip('-')}.",
                )
            if name in reserved.get(section, {}):
                fail(file, key, f"is not a free flag; {reserved[section][name]}.")
            plain = (str, int, float, type(None))  # and bool, which is an int
            for item in value if isinstance(value, list) else [value]:
                if not isinstance(item, plain):
                    fail(
                        file,
                        key,
                        "a flag's value is text (in quotes where it looks like a date), a number, true, "
                        f"false, null or a flat list of these, not {reprlib.repr(item)}.",
                    )
            problem = smuggled(value)
            if problem:
                fail(file, key, problem)


def _reserved_flags() -> Dict[str, Dict[str, str]]:
    """Flags that the runner itself sets, and what to say instead."""
    own = "the recipe runner sets it"
    train = {
        name: own for name in ("user-dir", "save-dir", "log-format", "log-file", "no-progress-bar", "cpu")
    }
    for key in (
        "task",
        "criterion",
        "max_tokens",
        "max_epoch",
        "max_update",
        "seed",
        "keep_last_epochs",
        "log_interval",
    ):
        train[key.replace("_", "-")] = f"say train.{key}"
    distributed = ("world-size", "rank", "init-method", "port", "no-spawn", "num-procs")
    train.update(
        {f"distributed-{name}": "say --gpus, --nodes, --node-rank and --master" for name in distributed}
    )
    train["update-freq"] = "it follows from train.effective_batch_tokens"
    train.update({name: "say train.precision" for name in ("fp16", "bf16", "amp")})
    model = {
        key.replace("_", "-"): f"say model.{key}"
        for key in ("arch", "num_experts", "experts_per_token", "expert_dim", "share_all_embeddings")
    }
    generate = {
        "path": own,
        "user-dir": own,
        "gen-subset": "say generate.subsets",
        "beam": "say generate.beam",
        "lenpen": "say generate.lenpen",
        "max-tokens": "say generate.max_tokens",
        "remove-bpe": "say generate.remove_bpe",
        "cpu": own,
    }
    data = {
        "joined-dictionary": "say data.joined_dictionary",
        "source-lang": "say data.source",
        "target-lang": "say data.target",
        "destdir": own,
        "user-dir": own,
    }
    score = {"json": own, "masked-lm": own, "classifier": own, "data": own, "subset": "say score.subsets"}
    score.update({"path": own, "user-dir": own, "gen-subset": "say score.subsets", "cpu": own})
    both = {**train, **model}
    return {"data": data, "model": both, "train": both, "generate": generate, "score": score}
