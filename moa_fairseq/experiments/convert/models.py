"""Checkpoints that conversions read and write, and models built from their settings, without data."""

import argparse
import copy
import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.models.roberta.model import RobertaModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import Tensor, nn

from moa_fairseq.errors import UserError
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
# Job → fairseq's model, the name of that model, and the base class of the mixtures for that job
BODIES = {
    "translation": (TransformerModel, "transformer", MixtureTransformerModel),
    "masked LM": (RobertaModel, "roberta", MixtureRobertaModel),
    "causal LM": (TransformerLanguageModel, "transformer_lm", MixtureLanguageModel),
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
    name = _name(settings)
    registered = ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name)
    for job, (dense, _, mixture) in BODIES.items():
        if registered is dense:
            return DENSE, job
        if registered is not None and issubclass(registered, mixture):
            return registered.attention_family, job
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
        UserError: if the family has no model for this job, or if fairseq's own model is asked for, but the
            model has a constant factor on the attention's output, which fairseq's lacks.
    """
    _, name, _ = BODIES[job]
    scale = getattr(settings, "attention_output_scale", None)
    if family == DENSE and scale not in (None, 1.0):
        raise UserError(
            f"The model was trained with --attention-output-scale {scale}, which fairseq's own attention "
            "lacks. Convert to another family, or keep the checkpoint without conversion."
        )
    fields = family_fields()
    if family == DENSE:
        fields |= {field.name for field in dataclasses.fields(FamilySettings)}
    else:
        name = _architecture(family, job)
    # fairseq's translation model may have a family's fields only if it was a mixture of that family.
    common = dict(vars(settings))
    for field in fields | _OF_MIXTURES:
        common.pop(field, None)
    if family != DENSE:
        positions = getattr(settings, "positions", None)
        # The new architecture may have another default
        if job == "causal LM" and positions is None:
            positions = "sinusoidal"
            if common.get("decoder_learned_pos"):
                positions = "learned"
        head_gate = getattr(settings, "head_gate", None)
        common.update(positions=positions, head_gate=head_gate, attention_output_scale=scale)
    common.update(values, arch=name, _name=name)
    return argparse.Namespace(**common)


def _architecture(family: str, job: str) -> str:
    """The default architecture of a family. Raises UserError if it has no model for the job."""
    _, _, mixture = BODIES[job]
    for model in MODEL_REGISTRY.values():
        if issubclass(model, mixture) and getattr(model, "attention_family", None) == family:
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

    Settings of unknown origin can cause any error.

    Args:
        settings: the settings of the model; the defaults of its architecture are added to them in place.
        weights: the weights that say how many symbols the model has; they are not loaded.

    Raises:
        UserError: for weights without token embeddings.
    """
    name = _name(settings)
    model: Any = ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY[name]
    if name in ARCH_CONFIG_REGISTRY:
        ARCH_CONFIG_REGISTRY[name](settings)
    source = dictionary_of(_symbols(weights, ("encoder.", "decoder.")))
    target = dictionary_of(_symbols(weights, ("decoder.", "encoder.")))
    task = SimpleNamespace(
        source_dictionary=target if len(source) == len(target) else source,
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
    lacking = [name for name in result.missing_keys if not {*name.split(".")} & {*may_lack}]
    for problem, names in (
        ("lacks", lacking),
        ("has more than the model needs:", result.unexpected_keys),
    ):
        if names:
            listed = ", ".join(sorted(names)[:4])[:300]
            raise UserError(f"The checkpoint {problem} {listed}: it belongs to another model.")


def _name(settings: argparse.Namespace) -> Any:
    """The model's name in ARCH_MODEL_REGISTRY or MODEL_REGISTRY; None if it is in neither."""
    for key in ("_name", "arch"):
        name = getattr(settings, key, None)
        if name in ARCH_MODEL_REGISTRY or name in MODEL_REGISTRY:
            return name
    return None


def _symbols(weights: State, sides: tuple[str, ...]) -> int:
    """The number of symbols of the first side that has token embeddings, in all bands of adaptive inputs."""
    for side, ending in itertools.product(sides, ("embed_tokens.weight", ".0.weight")):
        rows = 0
        for name, matrix in weights.items():
            is_embedding = name.startswith(side) and ".embed_tokens." in f".{name}"
            if is_embedding and name.endswith(ending) and matrix.dim() == 2:
                rows += len(matrix)
        if rows:
            return rows
    raise UserError(
        "The checkpoint has no token embeddings (embed_tokens): its model is not supported."
    )
