"""Fine-tuning: a recipe on top of another run's model, with that model's subwords and symbols (MAE §5.2)."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, Dict

from moa_fairseq.data_prep.translation import CODES
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.run_folder import RunState, is_whole, trained_checkpoint
from moa_fairseq.recipes.schema import Data, Recipe

log = logging.getLogger(__name__)


def resolve(recipe: Recipe) -> Recipe:
    """The recipe with all that follows from `pretrained` and `finetune`; others come back as they are.

    noft: nothing is trained, the pretrained model is evaluated. ftg: the gates by plain SGD at the recipe's
    gate-lr, all other optimisation flags being the experts'. The data is segmented with the merges and
    numbered with the dictionaries of the pretrained run, unless the recipe names others.
    """
    if recipe.finetune is None:
        return recipe
    flags = dict(recipe.train.flags)
    if recipe.finetune != "noft":
        checkpoint = pretrained_checkpoint(recipe.pretrained)
        flags.update({"finetune": recipe.finetune, "finetune-from-model": str(checkpoint)})
    if recipe.finetune == "ftg":
        flags = {name: value for name, value in flags.items() if not name.startswith(("adam-", "warmup-"))}
        plain = {"optimizer": "sgd", "lr": flags.get("gate-lr", 1.0), "lr-scheduler": "fixed"}
        flags.update({**plain, "weight-decay": 0.0})
    average = None if recipe.finetune == "noft" else recipe.average
    return dataclasses.replace(
        recipe,
        data=_data_of(recipe.data, Path(recipe.pretrained)),
        train=dataclasses.replace(recipe.train, flags=flags),
        average=average,
    )


def pretrained_checkpoint(pretrained: str) -> Path:
    """The checkpoint file that `pretrained` stands for: itself, or what a run folder has to show."""
    path = Path(pretrained)
    return path if path.suffix == ".pt" else trained_checkpoint(path)


def check_pretrained(recipe: Recipe, data: Path) -> None:
    """Before hours are lost: the pretrained checkpoint is there, and `data` has its dictionaries.

    Warns of what could not be checked. Raises UserError naming the key and the remedy.
    """
    checkpoint = pretrained_checkpoint(recipe.pretrained)
    if not is_whole(checkpoint):
        raise UserError(
            f"pretrained: {checkpoint} is missing or cut off. Train that model first, or name a checkpoint "
            "or another run folder: --set pretrained=runs/NAME."
        )
    original = _binarised_of(Path(recipe.pretrained))
    if original is None:
        log.warning(
            f"{recipe.pretrained} does not tell what it was trained on. Its dictionaries must be those in "
            f"{data}: a run folder as `pretrained`, or data.flags.srcdict, would see to that."
        )
    elif recipe.data.codes is None and recipe.data.recipe != "binarised":
        log.warning(
            f"no BPE merges were found with {original}; text that is not segmented already stays "
            "words. If the pretrained model has subwords, name its merges: --set data.codes=FILE."
        )
    for language in (recipe.data.source, recipe.data.target) if original else ():
        name = f"dict.{language}.txt"
        there, here = (_bytes(folder / name) for folder in (original, data))
        if there is not None and there != here:
            raise UserError(
                f"{data / name} differs from the pretrained model's {original / name}: the model would take "
                "one word for another. Let the prepare stage make the data (leave --data out, or give it "
                "the raw text), or binarise with --srcdict and --tgtdict of the pretrained model."
            )


def _data_of(data: Data, pretrained: Path) -> Data:
    folder = _binarised_of(pretrained)
    if folder is None or data.recipe == "binarised":
        return data
    found = (path for path in (folder.parent / "bpe" / CODES, folder.parent / CODES) if path.is_file())
    codes = data.codes or (None if data.bpe else str(next(found, "")) or None)
    return dataclasses.replace(data, codes=codes, flags={**_dictionaries(data, folder), **data.flags})


def _dictionaries(data: Data, folder: Path) -> Dict[str, Any]:
    named = {"srcdict": str(folder / f"dict.{data.source}.txt")}
    if not data.joined_dictionary:
        named["tgtdict"] = str(folder / f"dict.{data.target}.txt")
    return named


def _binarised_of(pretrained: Path) -> Path | None:
    """The binarised folder that a run folder was trained on, if both are still there."""
    if not pretrained.is_dir():
        return None
    folder = RunState(pretrained).get("prepare").get("folder")
    return Path(folder) if folder and Path(folder).is_dir() else None


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
