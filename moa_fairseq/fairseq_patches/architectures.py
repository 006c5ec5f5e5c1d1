"""A checkpoint of another model: says which settings differ, where fairseq says only that something does."""

from __future__ import annotations

import argparse
import functools
from typing import Any, Callable, Dict, List

from fairseq.models import ARCH_MODEL_REGISTRY

from moa_fairseq.errors import UserError
from moa_fairseq.fairseq_patches.checkpoint_files import load_checkpoint

_MOST = 8  # differences that are listed


def naming_what_differs(load: Callable) -> Callable:
    """Wrap the trainer's loading of a checkpoint, to resume from or to fine-tune."""

    @functools.wraps(load)
    def wrapped(trainer: Any, filename: str, *args: Any, **options: Any) -> Any:
        try:
            return load(trainer, filename, *args, **options)
        except Exception as error:
            if "ensure that the architectures match" not in str(error):
                raise
            found = _differences(load_checkpoint(filename), trainer.cfg.model)
            torchs_reason = " ".join(str(error.__context__).split())
            raise UserError(
                f"{filename} holds another model than that of this command, and cannot be loaded: "
                f"{'; '.join(found[:_MOST]) or torchs_reason[:500]}. Give the flags that the checkpoint was "
                "made with; or, to train another model, choose another --save-dir."
            ) from error

    return wrapped


def _differences(state: Dict[str, Any], model: Any) -> List[str]:
    """Each of the model's own flags whose value in the checkpoint is not that of this command."""
    before, now = (
        dict(settings.items()) if hasattr(settings, "items") else vars(settings)
        for settings in ((state.get("cfg") or {}).get("model") or state.get("args") or {}, model)
    )
    parser = argparse.ArgumentParser()
    arch = now.get("arch") or now["_name"]
    ARCH_MODEL_REGISTRY[arch].add_args(parser)
    names = ["arch", *(action.dest for action in parser._actions if "drop" not in action.dest)]
    return [
        f"--{name.replace('_', '-')} was {before[name]} and is {now[name]}"
        for name in dict.fromkeys(names)
        if name in before and name in now and str(before[name]) != str(now[name])
    ]
