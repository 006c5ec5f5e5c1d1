"""One training carried out by several programs: each machine's, or each of torchrun's processes."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from moa_fairseq.errors import UserError
from moa_fairseq.recipes.run_folder import RunState

# After a restart of torchrun, the program that kept the run folder before may take its time to go.
HANDOVER_SECONDS = 60.0


def check_shared(stage: str, restart: bool, data: Optional[Path], folder: Path) -> None:
    """Several programs train together; anything else is for one of them alone. Raises UserError."""
    if stage != "train":
        raise UserError(
            f"Several machines (or torchrun's processes) can share the train stage only, not --stage "
            f"{stage}: run --stage prepare on one of them first, then --stage train on all, then the "
            "other stages on one. The scripts in scripts/launch/ do so."
        )
    if restart:
        raise UserError("--restart moves the run folder aside under the others: give it to --stage prepare.")
    known = RunState(folder).get("prepare")
    if not known:
        raise UserError(
            f"No prepared data is known in {folder}: run --stage prepare with the same --save-dir first. The "
            "folder must be on a file system that all machines share."
        )
    if data and str(data.resolve()) not in (known.get("source"), known.get("folder")):
        raise UserError(f"{folder} was prepared from {known.get('source')}, not from --data {data}.")
