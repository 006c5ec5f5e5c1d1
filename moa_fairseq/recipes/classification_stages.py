"""What is particular to a classifier's recipe: its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional, Sequence

from moa_fairseq.data_prep.binarised import (
    INPUT,
    LABEL,
    check_classification,
    check_place,
    classification_flags,
)
from moa_fairseq.data_prep.catalogue import classification_sets
from moa_fairseq.data_prep.prepare import Prepared, given_fingerprint
from moa_fairseq.data_prep.prepare_classification import ClassificationPreparation
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.running import command_line


def prepare(
    settings: Mapping[str, Any],
    subsets: Sequence[str],
    source: Optional[Path],
    root: Path,
    preprocess: Callable[[Mapping[str, Any]], None],
    say: Callable[[str], None],
) -> Prepared:
    """Carry out the data section of a classifier; arguments as of Preparation. Raises UserError."""
    if source is None:
        dataset = classification_sets()[settings["recipe"]]
        return ClassificationPreparation(dataset, root, preprocess, say).run()
    check_place(source)
    lines = check_classification(source, subsets)
    say(f"{source}: binarised already; used as it is")
    return Prepared(source, lines, given_fingerprint(source / INPUT))


def preprocess_commands(recipe: Recipe, root: Path) -> List[List[str]]:
    """The last steps of the preparation, for --dry-run."""
    splits = classification_sets()[recipe.data.recipe].subsets
    text, binarised = root / "text", root / "binarised"
    return [
        ["fairseq-preprocess", *command_line.flags(classification_flags(text, binarised, name, splits))]
        for name in (INPUT, LABEL)
    ]
