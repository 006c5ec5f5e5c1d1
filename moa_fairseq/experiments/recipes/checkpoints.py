"""The models of a run folder: complete checkpoints, the checkpoint to resume from, fine-tuning (MAE §5.2)."""

import ast
import dataclasses
import errno
import logging
import shutil
import zipfile
import zlib
from pathlib import Path

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.job import CODES
from moa_fairseq.experiments.data.text_files import unverified_text_files
from moa_fairseq.experiments.make import read_step_records
from moa_fairseq.experiments.recipes.schema import Data, Generate, Recipe
from moa_fairseq.experiments.records.json_files import Values
from moa_fairseq.experiments.scoring.average import numbered_checkpoints
from moa_fairseq.layers.mae import RANDOM_EXPERT
from moa_fairseq.plugin.patches.checkpoint_reading import check_sums, load_checkpoint
from moa_fairseq.plugin.patches.checkpoint_writing import copy_whole

LAST = "checkpoint_last.pt"
BEST = "checkpoint_best.pt"
log = logging.getLogger(__name__)


def trained_checkpoint(folder: Path) -> Path:
    """The result of a run folder: its averaged checkpoint, else its best; average.pt if neither exists.

    The folder may also be a --save-dir of fairseq-train.
    """
    paths = (folder / "average.pt", folder / "checkpoints" / BEST, folder / BEST)
    return next(filter(Path.is_file, paths), paths[0])


def pretrained_checkpoint(pretrained: str) -> Path:
    """The checkpoint file for `pretrained`: the file itself, or a run folder's result."""
    path = Path(pretrained)
    return path if path.suffix == ".pt" else trained_checkpoint(path)


def is_whole(checkpoint: Path) -> bool:
    """False for a checkpoint that is missing or was cut off, because a zip file ends with its directory."""
    return checkpoint.is_file() and zipfile.is_zipfile(checkpoint)


def checkpoint_to_resume(folder: Path) -> Path | None:
    """checkpoint_last.pt, or the newest readable checkpoint if a crash or a disk damaged the last one.

    Reads the whole file, because torch writes a checksum for every part of it, and warns of every damaged
    file that it skips.

    Returns:
        The checkpoint; None if there are none, so that training starts from the beginning.

    Raises:
        UserError: if there are checkpoints but none is readable.
    """
    numbered = numbered_checkpoints(folder, by_updates=False)
    numbered += numbered_checkpoints(folder, by_updates=True)
    paths = [path for _, path in numbered]
    paths.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    candidates = list(filter(Path.exists, (folder / LAST, *paths, folder / BEST)))
    for path in candidates:
        if _is_readable(path):
            return path
        log.warning(
            "%s is damaged (cut off, or changed on the disk): looking for an older one", path
        )
    if candidates:
        raise UserError(
            f"All checkpoints in {folder} are damaged. Start over with --restart, which moves the run aside."
        )
    return None


def _is_readable(checkpoint: Path) -> bool:
    """Whether all parts of a checkpoint have torch's checksums."""
    try:
        with zipfile.ZipFile(checkpoint) as archive, open(checkpoint, "rb") as stream:
            if any(name.endswith("/data.pkl") for name in archive.namelist()):
                check_sums(stream)
                return True
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError):
        pass
    except OSError as error:
        # These errors are of a file that was cut off (a position before its start), or of a bad disk. With
        # any other (no permission, an unavailable server) the checkpoint may be complete, and an older one
        # must not replace it
        if error.errno not in (None, errno.EINVAL, errno.EIO):
            raise
    return False


def restore_last_checkpoint(folder: Path) -> None:
    """Before a training resumes: restore checkpoint_last.pt if any checkpoint is complete.

    A save writes a numbered checkpoint, then the best and the last as copies of it. A full disk or a kill in
    between leaves the copies out.

    Raises:
        UserError: see `checkpoint_to_resume`.
    """
    newest = checkpoint_to_resume(folder)
    if newest is None or newest.name == LAST:
        return
    log.info("train: %s is damaged or missing; resuming from %s", LAST, newest.name)
    state = load_checkpoint(newest).get("extra_state") or {}
    is_best = state.get("val_loss") is not None and state["val_loss"] == state.get("best")
    if is_best and newest.name != BEST:
        copy_whole(shutil.copy, str(newest), str(folder / BEST))
    # LAST is written at the end, because it marks completion
    copy_whole(shutil.copy, str(newest), str(folder / LAST))


def prepared_data(run_folder: Path) -> Path | None:
    """The binarised folder on which a run was trained, if it still exists."""
    folder = prepare_facts(run_folder).get("folder")
    if isinstance(folder, str) and Path(folder).is_dir():
        return Path(folder)
    return None


def checkpoint_and_data(model: Path, data: Path | None = None) -> tuple[Path, Path | None]:
    """The checkpoint of a run folder, a --save-dir or a file, and its data.

    Args:
        model: the folder or file.
        data: the binarised folder that the user gave, if any.

    Returns:
        The checkpoint, and `data` or the folder that the run recorded; None for the folder if there is no
        record, as after plain fairseq-train.

    Raises:
        UserError: for a folder without a checkpoint.
    """
    if not model.is_dir():
        return model, data
    checkpoint = trained_checkpoint(model)
    if not checkpoint.is_file():
        raise UserError(
            f"There is no average.pt or checkpoint_best.pt in {model} or its checkpoints/. Train first, or "
            "give a checkpoint file (checkpoint_last.pt if the training had no validation)."
        )
    return checkpoint, data or prepared_data(model)


def prepare_facts(run_folder: Path) -> Values:
    """The prepare stage's record in a run folder: folder, sentences, fingerprint, source, settings."""
    facts = read_step_records(run_folder).get("prepare", {}).get("facts")
    if isinstance(facts, dict) and isinstance(facts.get("sentences", {}), dict):
        return facts
    return {}


def finetuned(recipe: Recipe) -> Recipe:
    """The recipe with the consequences of `pretrained` and `finetune`; a recipe without them is unchanged.

    With noft nothing is trained and the pretrained model is evaluated; train.seed draws the random expert of
    MAE's Table 5. With ftg the gates are trained by plain SGD at the recipe's gate-lr, and its other
    optimisation flags, which are for the experts, are left out. The data is segmented with the merges and
    numbered with the dictionaries of the pretrained run, unless the recipe gives others.
    """
    pretrained = recipe.pretrained
    if recipe.finetune is None or pretrained is None:
        return recipe
    folder = prepared_data(Path(pretrained))
    if folder and recipe.data.recipe != "binarised":
        recipe = dataclasses.replace(recipe, data=_segmented_as(recipe.data, folder))
    if recipe.finetune == "noft":
        return dataclasses.replace(recipe, average=None, generate=_generate_with_seed(recipe))
    checkpoint = pretrained_checkpoint(pretrained)
    flags = recipe.train.flags
    if recipe.finetune == "ftg":
        flags = {
            name: value
            for name, value in flags.items()
            if not name.startswith(("adam-", "warmup-"))
        }
        flags |= {
            "optimizer": "sgd",
            "lr": flags.get("gate-lr", 1.0),
            "lr-scheduler": "fixed",
            "weight-decay": 0.0,
        }
    start = {"finetune": recipe.finetune, "finetune-from-model": str(checkpoint)}
    train = dataclasses.replace(recipe.train, flags=flags | start)
    return dataclasses.replace(recipe, train=train)


def _segmented_as(data: Data, folder: Path) -> Data:
    """The data section. Merges and dictionaries that it lacks are those of the binarised folder."""
    codes = data.codes
    if not (codes or data.bpe):
        paths = [folder.parent / "bpe" / CODES, folder.parent / CODES]
        codes = next((str(path) for path in paths if path.is_file()), codes)
    dictionaries = {"srcdict": str(folder / f"dict.{data.source}.txt")}
    if not data.joined_dictionary:
        dictionaries["tgtdict"] = str(folder / f"dict.{data.target}.txt")
    return dataclasses.replace(data, codes=codes, flags=dictionaries | data.flags)


def _generate_with_seed(recipe: Recipe) -> Generate | None:
    """The beam search of a pretrained model. If it uses a random expert, train.seed draws the expert."""
    generate = recipe.generate
    if generate is None:
        return None
    overrides = ast.literal_eval(generate.flags.get("model-overrides") or "{}")
    if overrides.get("mae_evaluate_with") != RANDOM_EXPERT:
        return generate
    overrides["mae_evaluate_seed"] = recipe.train.seed
    return dataclasses.replace(
        generate, flags=generate.flags | {"model-overrides": repr(overrides)}
    )


def check_pretrained(recipe: Recipe, data: Path) -> None:
    """Check that the pretrained checkpoint exists and the data has its dictionaries, before hours are lost.

    Warns if something could not be checked.

    Args:
        recipe: the recipe, whose `pretrained` is a run folder or a checkpoint.
        data: the binarised folder for the fine-tuning.

    Raises:
        UserError: if one of these is missing or different.
    """
    pretrained = recipe.pretrained or ""
    checkpoint = pretrained_checkpoint(pretrained)
    if not is_whole(checkpoint):
        raise UserError(
            f"pretrained: {checkpoint} is missing or cut off. Train that model first, or give a checkpoint "
            "or another run folder by --set pretrained=runs/NAME."
        )
    original = prepared_data(Path(pretrained))
    if original is None:
        log.warning(
            "%s has no record of its training data; %s must have its dictionaries", pretrained, data
        )
        return
    unverified_text_files(checkpoint, original.resolve(), named=False)
    if recipe.data.codes is None and recipe.data.recipe != "binarised":
        if recipe.data.bpe:
            log.warning(
                "data.bpe learns new merges, which may differ from the merges of %s; "
                "--set data.bpe=null uses the model's own",
                original,
            )
        else:
            log.warning(
                "there are no BPE merges with %s: give the file of the model's merges: --set data.codes=FILE",
                original,
            )
    for language in (recipe.data.source, recipe.data.target):
        trained = original / f"dict.{language}.txt"
        current = data / f"dict.{language}.txt"
        if not trained.is_file():
            continue
        if not current.is_file() or current.read_bytes() != trained.read_bytes():
            raise UserError(
                f"{current} differs from the pretrained model's {trained}. Let the prepare stage make the "
                "data from the raw text, or binarise with --srcdict and --tgtdict of the pretrained model."
            )
