"""Named architectures: a row of a paper's table is a set of values over a body of fairseq's."""

from typing import Any, Callable, Mapping

from fairseq.models import MODEL_REGISTRY, register_model_architecture

from moa_fairseq.transformer.families import set_defaults, set_family_defaults


def register_arch(model: str, arch: str, body: Callable[[Any], None], values: Mapping[str, Any]) -> None:
    """Register `--arch arch` of a registered model.

    values: of flags (as in the args namespace), which hold unless the user gives others; body: fairseq's
    function that gives every other flag its value.
    """

    def architecture(args: Any) -> None:
        set_defaults(args, values)
        pre_norm = getattr(args, "decoder_normalize_before", None)
        body(args)
        if pre_norm is not None:  # fairseq's body of language models overwrites what was given
            args.decoder_normalize_before = pre_norm
        family = getattr(MODEL_REGISTRY[model], "attention_family", None)  # none: a dense counterpart
        if family is not None:
            set_defaults(args, {"positions": None})
            set_family_defaults(args, family)

    architecture.__name__ = arch
    register_model_architecture(model, arch)(architecture)
