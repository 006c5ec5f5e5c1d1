"""What the analyses of one trained model have in common: which model, which data, and where numbers go."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write
from moa_fairseq.recipes.run_folder import RunState, trained_checkpoint


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the data that runs through it, and how."""
    parser.add_argument("model", type=Path, metavar="RUN_DIR|CHECKPOINT")
    parser.add_argument("--data", type=Path, metavar="DATA_BIN", help="binarised data folder (the run's)")
    parser.add_argument("--subset", default="valid", help="which part of the data to run (valid)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, too")
    parser.add_argument("--max-tokens", type=int, default=4096, metavar="N", help="tokens in a batch (4096)")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")


def checked_model(args: argparse.Namespace) -> Tuple[Path, Path]:
    """The checkpoint and the data folder that the arguments stand for."""
    warnings.filterwarnings("ignore", message=".*pin_memory")
    if args.max_tokens < 1:
        raise UserError(f"--max-tokens {args.max_tokens}: a batch holds at least one token.")
    return checkpoint_and_data(args.model, args.data)


def checkpoint_and_data(model: Path, data: Optional[Path]) -> Tuple[Path, Path]:
    """A run folder stands for its averaged (else its best) checkpoint and for the data it was trained on."""
    checkpoint = model
    if model.is_dir():
        checkpoint = trained_checkpoint(model)
        if not checkpoint.is_file():
            raise UserError(
                f"{model} holds neither average.pt nor checkpoints/checkpoint_best.pt: train first."
            )
        data = data or Path(RunState(model).get("prepare").get("folder", "."))
    elif data is None:
        raise UserError(
            f"{model} is no run folder, so --data must name the binarised data to run through it."
        )
    return checkpoint, data


def write_json(path: Path, report: Dict[str, Any]) -> None:
    """Write a report, whole or not at all."""
    with atomic_write(path) as stream:
        json.dump(report, stream, indent=1, ensure_ascii=False)
        stream.write("\n")


def say_written(*paths: Optional[Path]) -> None:
    """Tell which files were written; None for one that was not asked for."""
    written = [str(path) for path in paths if path]
    if written:
        print(f"wrote {', '.join(written)}")
