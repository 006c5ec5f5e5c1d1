"""What every model family of this package does before fairseq builds the model."""

import argparse
from typing import Any, ClassVar, Dict

from omegaconf import DictConfig, OmegaConf

from moa_fairseq.errors import UserError

_HINTS = {"offload_activations": " (--checkpoint-activations works)"}


class MixtureFamily:
    """Precedes the fairseq model that it extends.

    A family says which flags it has (`add_family_args`) and what they default to (`set_defaults`).
    refused: options of fairseq that rebuild or read the inside of its own attention, which a mixture does
    not have, with the value that means off.
    """

    refused: ClassVar[Dict[str, Any]] = {
        "quant_noise_pq": 0,
        "scale_heads": False,
        "offload_activations": False,
    }

    @classmethod
    def hub_models(cls) -> dict:
        return {}  # the parent's are dense checkpoints

    @classmethod
    def add_family_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the family's attention."""
        raise NotImplementedError

    @classmethod
    def set_defaults(cls, args: argparse.Namespace) -> None:
        """Give every flag of the model that has no value one."""
        raise NotImplementedError

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        super().add_args(parser)
        cls.add_family_args(parser)

    @classmethod
    def completed(cls, args: Any) -> argparse.Namespace:
        """Command-line arguments, or the config of fairseq-hydra-train as such, with every default.

        Raises UserError for a refused option.
        """
        if isinstance(args, DictConfig):
            args = argparse.Namespace(**OmegaConf.to_container(args, resolve=True))
        cls.set_defaults(args)
        for name, off in cls.refused.items():
            if getattr(args, name, None) not in (off, None):
                flag = "--" + name.replace("_", "-") + _HINTS.get(name, "")
                raise UserError(f"{flag} has no meaning for mixtures of attention heads: leave it out.")
        return args
