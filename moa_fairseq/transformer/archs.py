"""Named architectures: a row of a paper's table is a set of values for one of fairseq's architectures."""

from typing import Any, Callable, Mapping

from fairseq.models import MODEL_REGISTRY, register_model_architecture

from moa_fairseq.transformer.families import set_defaults, set_family_defaults


def register_arch(model: str, arch: str, body: Callable[[Any], None], values: Mapping[str, Any]) -> None:
    """Register `--arch arch` of a registered model.

    values: of flags (as in the args namespace), unless the user gives others; body: fairseq's function that
    sets every other flag.
    """

    def architecture(args: Any) -> None:
        if hasattr(args, "no_scale_embedding") and not hasattr(args, "initialization"):
            args.initialization = "own"  # complete settings, of a checkpoint from before there was a choice
        set_defaults(args, values)
        pre_norm = getattr(args, "decoder_normalize_before", None)
        body(args)
        if pre_norm is not None:  # fairseq's function for language models overwrites it
            args.decoder_normalize_before = pre_norm
        family = getattr(MODEL_REGISTRY[model], "attention_family", None)  # none: a dense counterpart
        if family is not None:
            set_defaults(args, {"positions": None, "initialization": "own"})
            set_family_defaults(args, family)

    architecture.__name__ = arch
    register_model_architecture(model, arch)(architecture)
