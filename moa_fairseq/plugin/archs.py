"""Named architectures: a row of a paper's table is a set of values for one of fairseq's architectures."""

from collections.abc import Callable, Mapping
from typing import Any

from fairseq.models import MODEL_REGISTRY, register_model, register_model_architecture
from fairseq.models.roberta.model import base_architecture as roberta_architecture
from fairseq.models.transformer.transformer_legacy import base_architecture
from fairseq.models.transformer_lm import base_lm_architecture

from moa_fairseq.plugin.causal_lm import MixtureLanguageModel
from moa_fairseq.plugin.families import set_defaults, set_family_defaults
from moa_fairseq.plugin.masked_lm import MixtureRobertaModel
from moa_fairseq.plugin.translation import MixtureTransformerModel

Body = Callable[[Any], None]
Values = Mapping[str, Any]

# How a model's name ends → the class that it extends, and fairseq's function that sets every other flag
BASE_MODELS = {
    "transformer": (MixtureTransformerModel, base_architecture),
    "roberta": (MixtureRobertaModel, roberta_architecture),
    "lm": (MixtureLanguageModel, base_lm_architecture),
}


def register_models(
    family: str,
    model: str,
    archs: Mapping[str, Values],
    base_architectures: Mapping[str, Body] | None = None,
) -> None:
    """Register a model with attentions of a family, and its architectures, of which the first is the default.

    Args:
        family: a name of FAMILIES.
        model: a name that ends in an underscore and one of BASE_MODELS.
        archs: `--arch` → values of flags, by their names in the args namespace; a value that the user gives
            wins.
        base_architectures: `--arch` → the `body` of `register_arch`, for the architectures that do not extend
            fairseq's base architecture.
    """
    base, body = BASE_MODELS[model.rpartition("_")[2]]
    names = {"attention_family": family, "default_arch": next(iter(archs)), "__doc__": base.__doc__}
    register_model(model)(type(f"{model.title().replace('_', '')}Model", (base,), names))
    for arch, values in archs.items():
        register_arch(model, arch, (base_architectures or {}).get(arch, body), values)


def register_arch(model: str, arch: str, body: Body, values: Values) -> None:
    """Register `--arch arch` of a registered model.

    Args:
        model: a name that fairseq knows.
        arch: the name of the architecture.
        body: fairseq's function that sets every other flag; it is called with the args namespace.
        values: values of flags, by their names in the args namespace; a value that the user gives wins.
    """

    def architecture(args: Any) -> None:
        if hasattr(args, "no_scale_embedding") and not hasattr(args, "initialization"):
            # These are the complete settings of a checkpoint that is older than --initialization.
            args.initialization = "own"
        set_defaults(args, values)
        pre_norm = getattr(args, "decoder_normalize_before", None)
        body(args)
        if pre_norm is not None:  # fairseq's function for language models overwrites it
            args.decoder_normalize_before = pre_norm
        # fairseq's own models have no family.
        family = getattr(MODEL_REGISTRY[model], "attention_family", None)
        if family is not None:
            set_defaults(args, {"positions": None, "initialization": "own"})
            set_family_defaults(args, family)

    architecture.__name__ = arch
    register_model_architecture(model, arch)(architecture)
