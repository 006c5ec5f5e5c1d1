"""Checkpoints that conversions read and write, and models built from their settings, without data."""

import argparse
import copy
import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.models.roberta.model import RobertaModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.records.json_files import selected
from moa_fairseq.experiments.scoring.meta_model import dictionary_of, quiet
from moa_fairseq.layers.settings import FamilySettings
from moa_fairseq.plugin.causal_lm import MixtureLanguageModel
from moa_fairseq.plugin.families import FAMILIES
from moa_fairseq.plugin.masked_lm import MixtureRobertaModel
from moa_fairseq.plugin.patches.checkpoint_reading import load_checkpoint
from moa_fairseq.plugin.patches.checkpoint_writing import save_checkpoint
from moa_fairseq.plugin.patches.malformed_checkpoints import Allowance
from moa_fairseq.plugin.translation import MixtureTransformerModel

State = dict[str, Tensor]
DENSE = "dense"


class Body(NamedTuple):
    """The models for one job.

    Args:
        dense: fairseq's model.
        dense_name: the name of fairseq's model.
        mixture: the base class of the mixtures.
    """

    dense: type
    dense_name: str
    mixture: type


BODIES = {  # by job
    "translation": Body(TransformerModel, "transformer", MixtureTransformerModel),
    "masked LM": Body(RobertaModel, "roberta", MixtureRobertaModel),
    "causal LM": Body(TransformerLanguageModel, "transformer_lm", MixtureLanguageModel),
}
_OF_MIXTURES = {
    "attention_family",
    "positions",
    "attention_branch_scale",
    "attention_output_scale",
    "head_gate",
}


@dataclasses.dataclass
class Checkpoint:
    """What a conversion needs from a checkpoint.

    Args:
        model: the weights by name.
        cfg: group → fairseq's settings.
        is_old: whether the checkpoint has all settings in a single namespace, here the group "model".
    """

    model: State
    cfg: dict[str, Any]
    is_old: bool = False

    @property
    def settings(self) -> argparse.Namespace:
        """A copy of the model's settings, whether the checkpoint has them as a namespace or a dict."""
        group = self.cfg["model"]
        if not isinstance(group, dict):
            group = vars(group)
        return argparse.Namespace(**copy.deepcopy(group))


def read(path: Path) -> Checkpoint:
    """Read a checkpoint as data; no code in it is run.

    Args:
        path: the file.

    Raises:
        UserError: if the file is missing or damaged, contains anything but tensors, containers and
            namespaces, or is not a checkpoint of a whole fairseq model.
    """
    state = load_checkpoint(path)
    if "fsdp_metadata" in state:
        raise UserError(
            f"{path} is one of several shards written by --ddp-backend fully_sharded. Save the whole model "
            "first (without --use-sharded-state)."
        )
    cfg = state.get("cfg")
    args = state.get("args")
    if args is not None:
        return Checkpoint(state["model"], {"model": args}, is_old=True)
    if cfg is None or cfg.get("model") is None:
        raise UserError(f"{path} does not name its model (cfg.model), so fairseq did not write it.")
    return Checkpoint(state["model"], cfg)


def write(checkpoint: Checkpoint, path: Path, made_by: Mapping[str, Any]) -> None:
    """Write a checkpoint, whole or not at all, as fairseq does before its first update.

    Args:
        checkpoint: the weights and settings to write.
        path: the file.
        made_by: the provenance of the file.
    """
    start = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    state = {
        "args": checkpoint.cfg["model"] if checkpoint.is_old else None,
        "cfg": None if checkpoint.is_old else checkpoint.cfg,
        "model": checkpoint.model,
        "criterion": None,
        "optimizer_history": [start],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}},
        "last_optimizer_state": None,
        "made_by": dict(made_by),
    }
    save_checkpoint(state, path)


def kind_of(settings: argparse.Namespace) -> tuple[str, str]:
    """The kind of model that settings describe.

    Args:
        settings: the settings of a model.

    Returns:
        The family of its attention, or DENSE, and its job, a key of BODIES.

    Raises:
        UserError: for any other model.
    """
    name, model = _registered(settings)
    for job, body in BODIES.items():
        if model is body.dense:
            return DENSE, job
        if model is not None and issubclass(model, body.mixture):
            return model.attention_family, job
    arch = getattr(settings, "arch", name)
    raise UserError(
        f"The checkpoint's model has the architecture {arch}, but conversions support only fairseq's "
        "transformer, roberta and transformer_lm, and the mixtures built on them (those of a plugin with "
        "moa-fairseq --user-dir DIR convert)."
    )


def family_fields() -> set[str]:
    """The names of all settings that belong to a single family of attention."""
    names: set[str] = set()
    for family in FAMILIES.values():
        names.update(field.name for field in family.own_fields())
    return names


def settings_for(
    settings: argparse.Namespace, family: str, job: str, values: dict[str, Any]
) -> argparse.Namespace:
    """The settings of the same model with another attention.

    Args:
        settings: the settings of the model.
        family: the family of the new attention, or DENSE.
        job: a key of BODIES.
        values: name of a field of the family's settings → its value.

    Raises:
        UserError: if the family has no model for this job.
    """
    dropped = family_fields() | _OF_MIXTURES
    carried_over: dict[str, Any] = {}
    if family == DENSE:
        name = BODIES[job].dense_name
        dropped |= {field.name for field in dataclasses.fields(FamilySettings)}
    else:
        name = _architecture(family, job)
        names = ("positions", "head_gate", "attention_output_scale")
        carried_over = selected(vars(settings), names)
        # The new architecture may have another default
        if job == "causal LM" and carried_over["positions"] is None:
            learned = getattr(settings, "decoder_learned_pos", False)
            carried_over["positions"] = "learned" if learned else "sinusoidal"
    common = {key: value for key, value in vars(settings).items() if key not in dropped}
    return argparse.Namespace(**common | carried_over | values | {"arch": name, "_name": name})


def _architecture(family: str, job: str) -> str:
    """The default architecture of a family. Raises UserError if it has no model for the job."""
    mixtures = BODIES[job].mixture
    for model in MODEL_REGISTRY.values():
        if issubclass(model, mixtures) and getattr(model, "attention_family", None) == family:
            return model.default_arch
    raise UserError(f"--to {family}: there is no model of that family for this job ({job}).")


def as_group(settings: argparse.Namespace, family: str, job: str) -> Any:
    """A checkpoint's cfg.model as fairseq writes it.

    Args:
        settings: the settings of the model.
        family: the family of its attention, or DENSE.
        job: a key of BODIES.

    Returns:
        A dict for a model whose settings are a fairseq dataclass, else the namespace.
    """
    if (family, job) != (DENSE, "causal LM"):
        return settings
    names = {field.name for field in dataclasses.fields(TransformerLanguageModelConfig)}
    return {key: value for key, value in vars(settings).items() if key in names or key == "_name"}


def build(settings: argparse.Namespace, weights: State) -> nn.Module:
    """Build a model from its settings, initialised with a fixed seed.

    Args:
        settings: the settings of the model; the defaults of its architecture are added to them in place.
        weights: the weights that say how many symbols the model has; they are not loaded.

    Raises:
        UserError: for weights without token embeddings.
        Exception: any, for settings of unknown origin.
    """
    name, model = _registered(settings)
    if name in ARCH_CONFIG_REGISTRY:
        ARCH_CONFIG_REGISTRY[name](settings)
    source = dictionary_of(_symbols(weights, ("encoder.", "decoder.")))
    target = dictionary_of(_symbols(weights, ("decoder.", "encoder.")))
    task = SimpleNamespace(
        source_dictionary=source,
        target_dictionary=target,
        dictionary=target,
        output_dictionary=target,
        args=settings,
        cfg=settings,
    )
    with quiet(), torch.random.fork_rng(devices=[]), Allowance(weights.values()):
        torch.manual_seed(1)
        return model.build_model(settings, task)


def load(model: nn.Module, weights: State, may_lack: tuple[str, ...] = ()) -> None:
    """Put weights into a model.

    Args:
        model: the model, which is changed in place.
        weights: name of a parameter → its value.
        may_lack: parameters with one of these words in their dotted name may keep their initial values.

    Raises:
        UserError: if a name is missing or unknown.
        RuntimeError: if a shape differs.
    """
    result = model.load_state_dict(dict(weights), strict=False)
    lacking = [name for name in result.missing_keys if set(may_lack).isdisjoint(name.split("."))]
    for problem, names in (
        ("lacks", lacking),
        ("has more than the model needs:", result.unexpected_keys),
    ):
        if names:
            listed = ", ".join(sorted(names)[:4])[:300]
            raise UserError(f"The checkpoint {problem} {listed}: it belongs to another model.")


def _registered(settings: argparse.Namespace) -> tuple[str | None, Any]:
    """The name of a model in fairseq's registries, and its class; (None, None) if it is in none."""
    for key in ("_name", "arch"):
        name = getattr(settings, key, None)
        if model := ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name):
            return name, model
    return None, None


def _symbols(weights: State, sides: tuple[str, ...]) -> int:
    """The number of symbols of the first side that has token embeddings.

    Adaptive inputs have embeddings for each band of symbols, "embed_tokens.embeddings.BAND.0.weight".
    """
    for side, ending in itertools.product(sides, ("embed_tokens.weight", ".0.weight")):
        symbols = 0
        for name, matrix in weights.items():
            is_embedding = name.startswith(side) and ".embed_tokens." in f".{name}"
            if is_embedding and name.endswith(ending) and matrix.dim() == 2:
                symbols += len(matrix)
        if symbols:
            return symbols
    raise UserError(
        "The checkpoint has no token embeddings (embed_tokens): its model is not supported."
    )
