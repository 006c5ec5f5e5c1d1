"""Export a trained run as a small folder for others: weights in half precision, its text files, a model card.

moa-fairseq export runs/tatoeba_ende_moa_tiny moa-tiny-en-de
moa-fairseq translate moa-tiny-en-de english.txt

Every verb reads the folder like the run itself. README.md is the card: data and its terms of use, the
score with its signature, the training. The scores were measured before the weights were rounded.

With --transformers the folder is for Hugging Face's transformers instead, in the weights' own precision.
"""

import argparse
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import datasets
from moa_fairseq.experiments.data.text_files import (
    BINARISED,
    RUN_COPY,
    copy_text_files,
    run_copy_of,
)
from moa_fairseq.experiments.inference import transformers_folder
from moa_fairseq.experiments.recipes.checkpoints import trained_checkpoint
from moa_fairseq.experiments.recipes.loading import build, read_mapping
from moa_fairseq.experiments.recipes.schema import CAUSAL_LM, TRANSLATION, Recipe
from moa_fairseq.experiments.records.json_files import (
    MAPPING,
    Values,
    check_kinds,
    is_number,
    read_json,
    write_json,
    write_yaml,
)
from moa_fairseq.experiments.scoring.average import shared_storage
from moa_fairseq.files import atomic_folder, refuse_link_out, user_cache
from moa_fairseq.plugin.patches.checkpoint_reading import load_checkpoint
from moa_fairseq.plugin.patches.checkpoint_writing import save_checkpoint

log = logging.getLogger(__name__)
_RESULT = "result.json"
# Values of _RESULT that the card shows by their parts
_KINDS = {"metrics": MAPPING, "versions": MAPPING}
_REMEDY = "Run the recipe again."
_VERBS = {TRANSLATION: "translate", CAUSAL_LM: "complete"}


def models_folder() -> Path:
    """The folder of exported models: $MOA_FAIRSEQ_MODELS, else `models` in the cache of this package."""
    folder = os.environ.get("MOA_FAIRSEQ_MODELS")
    return Path(folder) if folder else user_cache() / "models"


def named_model(name: str) -> Path:
    """The folder of an exported model.

    Args:
        name: the name of a folder in `models_folder()`.

    Raises:
        UserError: for a path instead of a name, and for a model that does not exist.
    """
    if not name:
        raise UserError("--model is empty. Give the name of an exported model.")
    if name == ".." or Path(name).name != name:
        raise UserError(f"--model {name} is a path, not a name. Give a path as RUN.")
    folder = models_folder() / name
    if (folder / "average.pt").is_file():
        return folder
    names = sorted(path.parent.name for path in models_folder().glob("*/average.pt"))
    raise UserError(
        f"--model {name}: there is no {folder / 'average.pt'}. Models are in $MOA_FAIRSEQ_MODELS, else in "
        f"{user_cache() / 'models'}; available: {', '.join(names) or 'none'}. "
        f"`moa-fairseq export RUN {folder}` "
        "adds a model; `bash scripts/tiny_models.sh deu.txt` trains and exports moa-, moh- and "
        "dense-tiny-en-de."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq export`."""
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="run folder of `moa-fairseq recipe`")
    add("folder", type=Path, metavar="DIR", help="new folder; its name becomes the model's")
    add(
        "--transformers",
        action="store_true",
        help="for Hugging Face's transformers, which need no fairseq",
    )


def run(args: argparse.Namespace) -> int:
    """Write the folder, whole or not at all.

    Raises:
        UserError: for a run without a model, text or recipe, for weights that are too large for half
            precision, and for a folder that already exists.
    """
    if os.path.lexists(args.folder):
        raise UserError(
            f"{args.folder} already exists. Give a new folder, or delete this one first."
        )
    trained = _read_run(args.run_dir)
    with atomic_folder(args.folder) as folder:
        copy_text_files(trained.text, folder / RUN_COPY)
        if args.transformers:
            parameters = transformers_folder.write(
                folder, trained.checkpoint, trained.text, trained.recipe
            )
        else:
            parameters = _write_halved(folder, trained)
        card = _card(args.folder.name, trained, parameters, args.transformers)
        (folder / "README.md").write_text(card, "utf-8")
    size = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file())
    log.info(f"{args.folder}: {size / 1e6:.1f} MB; {args.folder / 'README.md'} is its card")
    return 0


class _TrainedRun(NamedTuple):
    """What an export reads of a run.

    Args:
        checkpoint: the averaged checkpoint, or the best.
        text: the run's copy of its binarised folder.
        recipe: the recipe.
        settings: the recipe as it is written in recipe.yaml.
        result: the content of result.json; {} for a run that was not scored.
    """

    checkpoint: Path
    text: Path
    recipe: Recipe
    settings: Values
    result: Values


def _read_run(folder: Path) -> _TrainedRun:
    """Read a run folder. Raise UserError if it lacks the model, its text or the recipe."""
    checkpoint = trained_checkpoint(folder)
    recipe_file = folder / "recipe.yaml"
    result_file = folder / _RESULT
    for path in (checkpoint, recipe_file, result_file, folder / RUN_COPY / BINARISED):
        refuse_link_out(path, folder)
    if not checkpoint.is_file():
        raise UserError(f"{folder} has no trained model: {checkpoint} is missing. Train it first.")
    text = run_copy_of(checkpoint)
    if text is None:
        raise UserError(
            f"{folder / RUN_COPY} is missing, but the model needs it to read text. Only runs of "
            "`moa-fairseq recipe` keep it. Train with a recipe, or run its command again to add it."
        )
    if not recipe_file.is_file():  # written after the last stage
        raise UserError(
            f"{recipe_file} is missing, because the run has not ended. Run its command again: it "
            "continues where it stopped."
        )
    settings = read_mapping(recipe_file, "recipe")
    recipe = build(Recipe, settings, str(recipe_file))
    result: Values = {}
    if result_file.exists():
        result = read_json(result_file, _REMEDY)
        check_kinds(result, _KINDS, str(result_file), _REMEDY)
    return _TrainedRun(checkpoint, text, recipe, settings, result)


def _write_halved(folder: Path, trained: _TrainedRun) -> int:
    """Write the weights in fp16, the recipe and the result. Returns the number of parameters."""
    weights = _halved(load_checkpoint(trained.checkpoint), trained.checkpoint)
    save_checkpoint(weights, folder / "average.pt")
    write_yaml(folder / "recipe.yaml", trained.settings)
    if trained.result:
        write_json(folder / _RESULT, trained.result)
    # Tied weights count once
    sizes = {tensor.data_ptr(): tensor.numel() for tensor in weights["model"].values()}
    return sum(sizes.values())


def _halved(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """The checkpoint without the optimizer, with weights in fp16; tied weights stay tied."""
    model: dict[str, torch.Tensor] = {}
    for name, leader in shared_storage(state["model"]).items():
        tensor = state["model"][name]
        if name != leader:
            model[name] = model[leader]
            continue
        model[name] = tensor.half() if tensor.is_floating_point() else tensor
        if not torch.equal(model[name].isfinite(), tensor.isfinite()):
            raise UserError(f"{path}: {name} has numbers beyond 65,504, too large for fp16.")
    if isinstance(state.get("extra_state"), dict):
        state["extra_state"].pop("carried_context", None)  # only a resumed training needs it
    return dict(state, model=model, last_optimizer_state=None)


def _card(name: str, trained: _TrainedRun, parameters: int, transformers: bool) -> str:
    """README.md: a table of the model, its data and its scores, and how to load it."""
    kind = trained.recipe.kind
    table = ["| | |", "| --- | --- |"]
    for label, value in _card_rows(trained, parameters).items():
        if value not in (None, ""):
            cell = " ".join(str(value).split()).replace("|", "\\|")  # signatures have bars
            table.append(f"| {label} | {cell} |")
    paragraphs = [f"# {name}", trained.recipe.summary, "\n".join(table)]
    if not trained.result:
        paragraphs.append("It was not scored.")
    elif not transformers:
        paragraphs.append(
            "The scores were measured before the weights were rounded to half precision."
        )
    if transformers:
        paragraphs.append(
            "\n".join(f"    {line}" for line in transformers_folder.usage(name, kind))
        )
    elif kind in _VERBS:
        paragraphs.append(f"    moa-fairseq {_VERBS[kind]} {name} text.txt")
    return "\n\n".join(paragraphs) + "\n"


def _card_rows(trained: _TrainedRun, parameters: int) -> Values:
    """The rows of a card; a value that is unknown is None or empty."""
    recipe = trained.recipe
    result = trained.result
    languages = (recipe.data.source, recipe.data.target)
    rows: Values = {
        "Architecture": recipe.model.arch,
        "Parameters": f"{parameters:,}",
        "Languages": " → ".join(filter(None, languages)),
    }
    if dataset := datasets().get(str(recipe.data.recipe)):
        rows["Data"] = f"{dataset.name}: {dataset.summary}"
        rows["Terms of use of the data"] = dataset.licence
    for metric, value in (result.get("metrics") or {}).items():
        label = f"{metric}, {result.get('subset')} set"
        rows[label] = round(value, 2) if is_number(value) else value
    for key in ("updates", "train_seconds", "hardware", "seed", "commit", "date"):
        rows[key.replace("_", " ").capitalize()] = result.get(key)
    versions = (result.get("versions") or {}).items()
    rows["Versions"] = ", ".join(f"{package} {version}" for package, version in versions)
    if result.get("command"):
        rows["Trained by"] = f"`{result['command']}`"
    return rows
