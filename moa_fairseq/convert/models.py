"""Which models can be converted, and how one is built from a checkpoint's settings without its data."""

from __future__ import annotations

import argparse
import dataclasses
from types import SimpleNamespace
from typing import Any, Dict, Tuple, Type

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.models.roberta.model import RobertaModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import nn

from moa_fairseq.convert.checkpoints import Checkpoint, State
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.skeleton import dictionary_of, quiet
from moa_fairseq.evaluation.trained_model import shortened
from moa_fairseq.fairseq_patches.malformed_checkpoints import Allowance
from moa_fairseq.transformer.causal_lm import MixtureLanguageModel
from moa_fairseq.transformer.families import FAMILIES
from moa_fairseq.transformer.masked_lm import MixtureRobertaModel
from moa_fairseq.transformer.translation import MixtureTransformerModel

DENSE = "dense"
# job → fairseq's model, its name, and the base class of a family's model for that job
BODIES = {
    "translation": (TransformerModel, "transformer", MixtureTransformerModel),
    "masked LM": (RobertaModel, "roberta", MixtureRobertaModel),
    "causal LM": (TransformerLanguageModel, "transformer_lm", MixtureLanguageModel),
}
_OF_MIXTURES = {"attention_family", "positions", "attention_branch_scale"}


def kind_of(settings: argparse.Namespace) -> Tuple[str, str]:
    """(family or DENSE, job) of a model's settings. Raises UserError for any other model."""
    name = _name(settings)
    found = ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name)
    for job, (dense, _, mixture) in BODIES.items():
        if found is dense:
            return DENSE, job
        if found is not None and issubclass(found, mixture):
            return found.attention_family, job
    arch = getattr(settings, "arch", name)
    raise UserError(
        f"The checkpoint holds a model of the architecture {arch}, but conversions only know fairseq's "
        "transformer, roberta and transformer_lm, and the mixtures built on them (those of a plugin with "
        "moa-fairseq --user-dir DIR convert)."
    )


def settings_for(
    settings: argparse.Namespace, family: str, job: str, values: Dict[str, Any]
) -> argparse.Namespace:
    """The settings of the same model with another attention; values: of the family's flags.

    Raises UserError where the family has no model for this job.
    """
    _, name, mixture = BODIES[job]
    if family != DENSE:
        models = [model for model in MODEL_REGISTRY.values() if issubclass(model, mixture)]
        own_models = [model for model in models if getattr(model, "attention_family", None) == family]
        if not own_models:
            raise UserError(f"--to {family}: there is no model of that family for this job ({job}).")
        name = own_models[0].default_arch
    own = {field.name for known in FAMILIES.values() for field in dataclasses.fields(known)}
    # fairseq's translation model may have a family's fields only if it was a mixture of that family.
    common = {key: value for key, value in vars(settings).items() if key not in own | _OF_MIXTURES}
    if family != DENSE:
        positions = getattr(settings, "positions", None)
        if job == "causal LM" and positions is None:  # an architecture may have others
            positions = "learned" if common.get("decoder_learned_pos") else "sinusoidal"
        common["positions"] = positions
    return argparse.Namespace(**{**common, **values, "arch": name, "_name": name})


def as_group(settings: argparse.Namespace, family: str, job: str) -> Any:
    """cfg.model as fairseq writes it: a dict for a model with a fairseq dataclass, else a namespace."""
    if (family, job) != (DENSE, "causal LM"):
        return settings
    known = {field.name for field in dataclasses.fields(TransformerLanguageModelConfig)}
    return {key: value for key, value in vars(settings).items() if key in known or key == "_name"}


def build(settings: argparse.Namespace, weights: State, seed: int = 1) -> nn.Module:
    """The model of these settings, initialised. weights: for how many symbols it has.

    Raises UserError if fairseq cannot build it.
    """
    name = _name(settings)
    model: Type = ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY[name]
    if name in ARCH_CONFIG_REGISTRY:
        ARCH_CONFIG_REGISTRY[name](settings)
    source = dictionary_of(_symbols(weights, ("encoder.", "decoder.")))
    target = dictionary_of(_symbols(weights, ("decoder.", "encoder.")))
    same = target if len(source) == len(target) else source
    task = SimpleNamespace(
        source_dictionary=same,
        target_dictionary=target,
        dictionary=target,
        output_dictionary=target,
        args=settings,
        cfg=settings,
    )
    try:
        with quiet(), torch.random.fork_rng(devices=[]), Allowance(weights.values()):
            torch.manual_seed(seed)
            return model.build_model(settings, task)
    except UserError:
        raise
    except Exception as error:  # settings of unknown origin can cause any error
        raise UserError(f"fairseq cannot build {name} with these settings: {error!r:.300}") from error


def load(model: nn.Module, weights: State, may_lack: Tuple[str, ...] = ()) -> None:
    """Put weights into a model. may_lack: parts of names that may stay as they are initialised.

    Raises UserError where a name or a shape does not fit.
    """
    try:
        result = model.load_state_dict(dict(weights), strict=False)
    except RuntimeError as error:
        raise UserError(f"The weights do not fit the settings beside them: {shortened(error)}") from error
    lacking = [name for name in result.missing_keys if not any(part in name.split(".") for part in may_lack)]
    for what, names in (("lacks", lacking), ("has more than the model needs:", result.unexpected_keys)):
        if names:
            shown = ", ".join(sorted(names)[:4])[:300]
            raise UserError(f"The checkpoint {what} {shown}: it is of another model.")


def _name(settings: argparse.Namespace) -> Any:
    """The model's name in ARCH_MODEL_REGISTRY or MODEL_REGISTRY."""
    names = (getattr(settings, key, None) for key in ("_name", "arch"))
    return next((name for name in names if name in ARCH_MODEL_REGISTRY or name in MODEL_REGISTRY), None)


def of_checkpoint(checkpoint: Checkpoint) -> nn.Module:
    """The model that a checkpoint holds, in evaluation mode. Raises UserError for an unknown one."""
    kind_of(checkpoint.settings)
    model = build(checkpoint.settings, checkpoint.model)
    load(model, checkpoint.model)
    return model.eval()


def _symbols(weights: State, sides: Tuple[str, ...]) -> int:
    """Rows of the embedding of the first side that has one; with adaptive inputs those of all bands."""
    for side in sides:
        matrices = {
            name: tensor.size(0)
            for name, tensor in weights.items()
            if name.startswith(side) and ".embed_tokens." in f".{name}" and tensor.dim() == 2
        }
        rows = [size for name, size in matrices.items() if name.endswith("embed_tokens.weight")]
        if rows := rows or [size for name, size in matrices.items() if name.endswith(".0.weight")]:
            return sum(rows)
    raise UserError("The checkpoint has no embeddings of tokens (embed_tokens): its model is not known here.")
