"""Flags of generation that fairseq misreads, or answers with a traceback."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import torch
from fairseq.models import FairseqLanguageModel
from fairseq.search import DiverseBeamSearch
from omegaconf import DictConfig, open_dict

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches.table import patch

_TESTS = "plugin/patches/test_generation.py::"
_SIDES = ("encoder", "decoder")
# Each of these flags chooses a search.
_SEARCHES = ("sampling", "diverse_beam_groups", "diversity_rate", "match_source_len")


class ConflictingSearches(UserError, ValueError):
    """Flags ask for different searches. It is also a ValueError, because fairseq raises that here."""


@patch(
    "fairseq.checkpoint_utils:prune_state_dict",
    f"{_TESTS}test_layers_of_one_side_leave_the_other_whole",
)
def keep_the_other_side(
    prune: Callable, state: dict[str, Any], model_cfg: Any = None
) -> dict[str, Any]:
    """Keep all layers of the side whose layers --model-overrides does not name.

    If --model-overrides names the layers to keep of the encoder or decoder only, fairseq drops all layers of
    the other, and its message blames the file.

    Raises:
        UserError: if a named layer does not exist on that side, or is named twice.
    """
    kept = {}
    for side in _SIDES:
        layers = getattr(model_cfg, f"{side}_layers_to_keep", None)
        kept[side] = "" if layers is None else str(layers)  # may be a number
    if not any(kept.values()):
        return prune(state, model_cfg)
    for side, text in kept.items():
        matches = [re.match(rf"{side}\..*?\blayers\.(\d+)\.", key) for key in state]
        existing = sorted({match[1] for match in matches if match}, key=int)
        words = [word.strip() for word in text.split(",")] if text else existing
        if len(set(words)) < len(words) or not set(words) <= set(existing):
            choice = "that side has no layers"
            if existing:
                choice = f"write some of {', '.join(existing)}, each once, with commas"
            raise UserError(f"--model-overrides: {side}_layers_to_keep {text[:80]!r}: {choice}.")
        is_config = isinstance(model_cfg, DictConfig)
        with open_dict(model_cfg) if is_config else contextlib.nullcontext():
            setattr(model_cfg, f"{side}_layers_to_keep", ",".join(words) or None)
    return prune(state, model_cfg)


@patch(
    "fairseq.tasks.fairseq_task:FairseqTask.build_generator",
    f"{_TESTS}test_flags_that_do_not_go_together",
)
def check_flags_of_search(
    build: Callable, task: Any, models: Any, args: Any, *further: Any, **options: Any
) -> Any:
    """Refuse flags of generation that conflict, or would be ignored.

    Conflicting flags end in a traceback, or are ignored: --nbest above --beam, and output that only
    iterative-refinement models print.

    Raises:
        ConflictingSearches: if flags ask for several searches.
        UserError: for other conflicts, for groups that do not divide the beam, and if --lm-path holds no
            language model.
    """

    def given(name: str) -> Any:
        return getattr(args, name, None)

    chosen = [f"--{name.replace('_', '-')}" for name in _SEARCHES if (given(name) or 0) > 0]
    if len(chosen) > 1:
        raise ConflictingSearches(f"{' and '.join(chosen)} are different searches: give only one.")
    beam = given("beam") or 5
    groups = given("diverse_beam_groups") or -1
    nbest = given("nbest") or 1
    if groups > 0 and beam % groups:
        raise UserError(
            f"--beam {beam} is not a multiple of --diverse-beam-groups {groups}: change one."
        )
    if nbest > beam and not given("score_reference"):
        raise UserError(
            f"--nbest {nbest} is larger than --beam {beam}: lower --nbest or raise --beam."
        )
    for name in ("print_step", "retain_iter_history"):
        if given(name):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} is for models with iterative refinement: leave it out.")
    lm = (options.get("extra_gen_cls_kwargs") or {}).get("lm_model")
    if lm is not None and not isinstance(lm, FairseqLanguageModel):
        raise UserError(
            f"--lm-path {given('lm_path')} holds a {type(lm).__name__}, not a language model: give "
            "a language model."
        )
    return build(task, models, args, *further, **options)


@patch(
    "fairseq.sequence_generator:SequenceGeneratorWithAlignment.generate",
    f"{_TESTS}test_diverse_groups_of_any_sentences",
)
@patch(
    "fairseq.sequence_generator:SequenceGenerator.generate",
    f"{_TESTS}test_diverse_groups_of_any_sentences",
)
def count_rows_not_sentences(
    generate: Callable, generator: Any, models: Any, sample: dict[str, Any], **options: Any
) -> Any:
    """Number the sentences of a batch from 0 for --diverse-beam-groups.

    --diverse-beam-groups looks up a table with a row for each sentence of the batch by the numbers that
    sentences have in the data set: an IndexError.
    """
    ids = sample.get("id")
    if ids is not None and isinstance(generator.search, DiverseBeamSearch):
        sample = sample | {"id": torch.arange(ids.numel(), device=ids.device)}
    return generate(generator, models, sample, **options)


@patch(
    "fairseq.search:LexicallyConstrainedBeamSearch.init_constraints",
    f"{_TESTS}test_constraints_need_a_program_that_reads_them",
)
def ask_for_constraints(
    init: Callable, search: Any, batch_constraints: Any, beam_size: int
) -> None:
    """Refuse --constraints in a program that reads no constraints.

    fairseq-generate accepts --constraints but reads no constraints.

    Raises:
        UserError: if there are no constraints.
    """
    if batch_constraints is None:
        remedy = "use fairseq-interactive, which reads them behind each sentence, after a tab"
        raise UserError(f"--constraints: binarised data has no constraints; {remedy}.")
    init(search, batch_constraints, beam_size)
