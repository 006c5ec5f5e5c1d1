"""Fine-tuning: a recipe on top of another run's model, with that model's subwords and symbols (MAE §5.2)."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Optional

from moa_fairseq.data_prep.prepare import CODES
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.checkpoints import is_whole, trained_checkpoint
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.running.state import marks

log = logging.getLogger(__name__)


def resolve(recipe: Recipe) -> Recipe:
    """The recipe with all that follows from `pretrained` and `finetune`; others come back as they are.

    noft: nothing is trained, the pretrained model is evaluated. ftg: the gates by plain SGD at the recipe's
    gate-lr, all other optimisation flags being the experts'. The data is segmented with the merges and
    numbered with the dictionaries of the pretrained run, unless the recipe names others.
    """
    if recipe.finetune is None or recipe.pretrained is None:
        return recipe
    flags, data = dict(recipe.train.flags), recipe.data
    if recipe.finetune != "noft":
        checkpoint = pretrained_checkpoint(recipe.pretrained)
        flags.update({"finetune": recipe.finetune, "finetune-from-model": str(checkpoint)})
    if recipe.finetune == "ftg":
        flags = {name: value for name, value in flags.items() if not name.startswith(("adam-", "warmup-"))}
        plain = {"optimizer": "sgd", "lr": flags.get("gate-lr", 1.0), "lr-scheduler": "fixed"}
        flags.update({**plain, "weight-decay": 0.0})
    folder = prepared_data(Path(recipe.pretrained))
    if folder and data.recipe != "binarised":
        found = (path for path in (folder.parent / "bpe" / CODES, folder.parent / CODES) if path.is_file())
        codes = data.codes or (None if data.bpe else str(next(found, "")) or None)
        sides = {"srcdict": data.source, **({} if data.joined_dictionary else {"tgtdict": data.target})}
        named = {flag: str(folder / f"dict.{language}.txt") for flag, language in sides.items()}
        data = dataclasses.replace(data, codes=codes, flags={**named, **data.flags})
    average = None if recipe.finetune == "noft" else recipe.average
    train = dataclasses.replace(recipe.train, flags=flags)
    return dataclasses.replace(recipe, data=data, train=train, average=average)


def pretrained_checkpoint(pretrained: str) -> Path:
    """The checkpoint file that `pretrained` stands for: itself, or what a run folder has to show."""
    path = Path(pretrained)
    return path if path.suffix == ".pt" else trained_checkpoint(path)


def prepared_data(run_folder: Path) -> Optional[Path]:
    """The binarised folder that a run was made on, if it is still there."""
    facts = marks(run_folder).get("prepare", {}).get("facts")
    folder = facts.get("folder") if isinstance(facts, dict) else None
    return Path(folder) if isinstance(folder, str) and Path(folder).is_dir() else None


def check_pretrained(recipe: Recipe, data: Path) -> None:
    """Before hours are lost: the pretrained checkpoint is there, and `data` has its dictionaries.

    Warns of what could not be checked. Raises UserError naming the key and the remedy.
    """
    pretrained = recipe.pretrained or ""
    checkpoint = pretrained_checkpoint(pretrained)
    if not is_whole(checkpoint):
        raise UserError(
            f"pretrained: {checkpoint} is missing or cut off. Train that model first, or name a checkpoint "
            "or another run folder: --set pretrained=runs/NAME."
        )
    original = prepared_data(Path(pretrained))
    if original is None:
        log.warning(
            f"{recipe.pretrained} does not tell what it was trained on. Its dictionaries must be those in "
            f"{data}: a run folder as `pretrained`, or data.flags.srcdict, would see to that."
        )
        return
    if recipe.data.codes is None and recipe.data.recipe != "binarised":
        log.warning(
            f"no BPE merges were found with {original}; text that is not segmented already stays "
            "words. If the pretrained model has subwords, name its merges: --set data.codes=FILE."
        )
    for language in (recipe.data.source, recipe.data.target):
        there, here = (folder / f"dict.{language}.txt" for folder in (original, data))
        if there.is_file() and not (here.is_file() and here.read_bytes() == there.read_bytes()):
            raise UserError(
                f"{here} differs from the pretrained model's {there}: the model would take one word for "
                "another. Let the prepare stage make the data (leave --data out, or give it the raw text), "
                "or binarise with --srcdict and --tgtdict of the pretrained model."
            )
