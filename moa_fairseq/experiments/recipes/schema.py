"""The contents of a recipe file: the sections, their keys and types, and the rules that connect keys."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
import reprlib
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from moa_fairseq.experiments.data.catalogue import (
    CLASSIFICATION,
    LEAST_COVERAGE,
    MASKED_LM,
    SENTENCEPIECE,
    SUBWORD_NMT,
    TRANSLATION,
    datasets,
)
from moa_fairseq.experiments.data.catalogue import LANGUAGE_MODELING as CAUSAL_LM
from moa_fairseq.process import unsafe_value

DATA_RECIPES = ("binarised", *(name for name, data in datasets().items() if data.encoder != "none"))
SEGMENTATIONS = (SUBWORD_NMT, SENTENCEPIECE)
PIECE_MODELS = ("unigram", "bpe")
PRECISIONS = ("auto", "fp32", "fp16", "bf16", "amp")
HEADLINE_METRICS = (
    *("multi_bleu", "compound_split_bleu", "sacrebleu", "get_ende_bleu", "moa_release_bleu"),
    *("masked_lm_ppl", "masked_lm_text_ppl", "masked_lm_word_ppl", "lm_ppl", "lm_bits"),
    "accuracy",
)
FINETUNING = ("noft", "ftg", "ftg_plus", "ftall")  # values of `finetune` (MAE, section 5.2)
# The types of recipes by the beginning of train.task; any other task is a translation.
KINDS = {"masked_lm": MASKED_LM, "language_modeling": CAUSAL_LM, "sentence_prediction": CLASSIFICATION}

# Models that are scored directly from checkpoints: the beginning of their headline metrics, their name.
_SCORED = {
    MASKED_LM: ("masked_lm_", "a masked language model"),
    CAUSAL_LM: ("lm_", "a causal language model"),
    CLASSIFICATION: ("accuracy", "a classifier"),
}
# Forbidden in all sections: recipes are shared, and their users expect them to write only the run folder.
REFUSED = (
    *("post-save-script", "use-plasma-view", "plasma-path"),
    *("log-file", "results-path", "save-predictions", "checkpoint-suffix", "aim-repo"),
)
# Flags that the runner sets itself, and the key to use instead.
OWN = (
    *("user-dir", "save-dir", "destdir", "path", "gen-subset", "subset", "data", "json", "masked-lm"),
    *("classifier", "cpu", "log-format", "no-progress-bar", "update-freq", "fp16", "bf16", "amp"),
    *("device-id", "joined-dictionary", "source-lang", "target-lang"),
    *(f"distributed-{x}" for x in ("world-size", "rank", "init-method", "port", "no-spawn", "num-procs")),
)
_INSTEAD = {
    **dict.fromkeys(("fp16", "bf16", "amp"), "set train.precision"),
    "update-freq": "it follows from train.effective_batch_tokens",
    "gen-subset": "set generate.subsets",
    "subset": "set score.subsets",
}
# With these flags an evaluation reads fewer sentences, or none of them changes what the model reads. For a
# translation the first flag is free: its result gives the number of skipped sentences.
SKIP = "skip-invalid-size-inputs-valid-test"
PARTIAL = (SKIP, "num-shards", "shard-id", "shorten-method")
POSITIONS = ("max-source-positions", "max-target-positions")
LARGEST = 2**63 - 1  # largest whole number in torch
SECTIONS = ("data", "model", "train", "generate", "score")
FLAG_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
FILE_NAME = re.compile(r"\w[\w.-]*")  # a part of file names: a language, a subset
Problems = Iterator[Tuple[str, str]]
# Settings of how a training runs, not of what it computes. A run may change them between two starts
# and still reproduce its row of the paper: keys of `train`, and flags of fairseq-train.
EXECUTION_KEYS = ("max_tokens", "min_tokens", "precision", "keep_last_epochs", "log_interval")
EXECUTION_FLAGS = (
    # communication between processes, and the share of each
    *("ddp-backend", "ddp-comm-hook", "bucket-cap-mb", "gradient-as-bucket-view", "find-unused-parameters"),
    *("heartbeat-timeout", "zero-sharding", "cpu-offload", "no-reshard-after-forward", "fp32-reduce-scatter"),
    "min-params-to-wrap",
    # memory against time
    *("checkpoint-activations", "memory-efficient-fp16", "memory-efficient-bf16", "fp16-no-flatten-grads"),
    *("fp16-init-scale", "fp16-scale-window"),
    # data loading and logs
    *("num-workers", "data-buffer-size", "tensorboard-logdir", "wandb-project"),
    # saved checkpoints: their requirements are checked elsewhere
    *("save-interval", "save-interval-updates", "keep-interval-updates", "keep-interval-updates-pattern"),
    *("keep-best-checkpoints", "no-epoch-checkpoints", "load-checkpoint-on-all-dp-ranks"),
    *("no-kernel-check", "compile-layers"),
)
INTERVAL = "save-interval-updates"
# The end of a training, in addition to its max_epoch and max_update: it may be later at the next start.
STOP_FLAGS = ("patience", "stop-time-hours", "stop-min-lr")
# fairseq-train would repeat these at each start, or lack their files: no run of a recipe could resume.
_ONCE = "fairseq would repeat it at every start and lose the training"
_FROM = "to start from the weights of a model, set train.flags.finetune-from-model, which does so once"
_NOTHING = "a run resumes from its last checkpoint and evaluates saved checkpoints"
CANNOT_GO_ON = {
    "restore-file": f"{_ONCE}; {_FROM}",
    "reset-optimizer": f"{_ONCE}; {_FROM}, with a new optimizer",
    "reset-lr-scheduler": f"{_ONCE}; {_FROM}, with a new schedule",
    "reset-meters": f"{_ONCE}; {_FROM}",
    "reset-dataloader": f"{_ONCE}; {_FROM}, and with the first epoch",
    "optimizer-overrides": "an interrupted run would train differently from an uninterrupted run; set the "
    "values themselves, such as train.flags.lr",
    "no-save": f"{_NOTHING}; for fewer files set train.flags.no-epoch-checkpoints",
    "no-last-checkpoints": f"{_NOTHING}; for fewer files set train.flags.no-epoch-checkpoints",
    "use-sharded-state": f"{_NOTHING} in one file; without the flag, fairseq gathers the shards",
    "use-bmuf": "no checkpoint has its momentum, so it would be lost at every start",
}


def _key(text: str, example: Any = None, choices: Iterable[str] = (), **default: Any) -> Any:
    """A key of a section. text, choices: its description in docs/recipe.yaml; example: its value there."""
    metadata = {"text": text, "example": example, "choices": tuple(choices)}
    return dataclasses.field(metadata=metadata, **default)


@dataclasses.dataclass
class Reproduces:
    """The published number that the recipe reproduces: paper, table and cell."""

    paper: str = _key("file of results/papers/", "moa")
    table: str = _key("number of the table", "1")
    row: str = _key("the row's name", "MoA Base (8K8E128D)")
    column: str = _key("the column's name", "WMT14 EnDe BLEU")
    value: Optional[float] = _key("the printed number", 28.4, default=None)


@dataclasses.dataclass
class Data:
    """The text, and its way to a binarised folder."""

    recipe: str = _key("source of the text", "parallel", DATA_RECIPES)
    source: Optional[str] = _key("language; not for language models and classifiers", "fr", default=None)
    target: Optional[str] = _key("language; not for language models and classifiers", "en", default=None)
    bpe: Optional[int] = _key(
        "number of joint BPE merges to learn on the training text (text_sp and sentencepiece: of pieces); "
        "null "
        "for segmented text",
        8000,
        default=None,
    )
    codes: Optional[str] = _key(
        "file of BPE merges, or a SentencePiece model, learned elsewhere; replaces bpe", default=None
    )
    segmentation: str = _key(
        "segmentation of parallel and binarised text; sentencepiece reads raw text without a tokeniser",
        choices=SEGMENTATIONS,
        default=SUBWORD_NMT,
    )
    piece_model: str = _key("SentencePiece model type", choices=PIECE_MODELS, default="unigram")
    byte_fallback: bool = _key(
        "sentencepiece: split letters without a piece into bytes, so that none is unknown", default=True
    )
    character_coverage: Optional[float] = _key(
        "text_sp and sentencepiece: character coverage, the share of the training text's letters that get a "
        "piece; null: 0.9995, without byte fallback 1",
        default=None,
    )
    allow_unknown: bool = _key(
        "accept training text in which more than 5 % of the pieces are <unk>", default=False
    )
    joined_dictionary: bool = _key(
        "one dictionary for both languages; with sentencepiece one model", default=True
    )
    lowercase: bool = _key("convert the text to lower case", default=False)
    tokenize: Optional[bool] = _key(
        "whether your own text is raw and must be tokenised; null: raw text is an error", True, default=None
    )
    train_fraction: Optional[float] = _key(
        "fraction of the training pairs to use, in (0, 1]; smaller fractions are subsets", default=None
    )
    train_fraction_seed: int = _key("random seed of the fraction", default=1)
    tokens: Optional[int] = _key(
        "c4 and pes2o: number of training tokens, from the beginning; null: the data set's number",
        default=None,
    )
    flags: Dict[str, Any] = _key("flags of fairseq-preprocess", {"workers": 2}, default_factory=dict)

    @property
    def running_text(self) -> bool:
        """True if decoded text equals the text before any tokeniser: it is scored without changes."""
        return self.segmentation == SENTENCEPIECE and not self.tokenize


@dataclasses.dataclass
class Model:
    """The architecture and, for mixtures of attention heads, their sizes."""

    arch: str = _key(
        "fairseq-train's --arch: docs/flags.md lists those of this package", "moa_transformer_tiny"
    )
    num_experts: Optional[int] = _key("E: experts per layer", 8, default=None)
    experts_per_token: Optional[int] = _key("K: experts selected per token", 4, default=None)
    expert_dim: Optional[int] = _key("D: head width of an expert", 48, default=None)
    share_all_embeddings: bool = _key("one embedding for encoder, decoder and output", True, default=False)
    flags: Dict[str, Any] = _key(
        "flags of fairseq-train (docs/flags.md)", {"dropout": 0.3}, default_factory=dict
    )

    def as_flags(self) -> Dict[str, Any]:
        """All of it as flags of fairseq-train."""
        own = {name.replace("_", "-"): value for name, value in vars(self).items() if name != "flags"}
        return {**own, **self.flags}


@dataclasses.dataclass
class Train:
    """Optimisation."""

    max_tokens: int = _key("most tokens per device and step, including padding", 4096)
    criterion: str = _key("fairseq-train's --criterion", "label_smoothed_cross_entropy_with_routing")
    task: str = _key("fairseq-train's --task", default="translation")
    effective_batch_tokens: Optional[int] = _key(
        "tokens per update over all devices and accumulation steps, including padding", 4096, default=None
    )
    min_tokens: Optional[int] = _key(
        "fewest tokens per device and step; null: the length of the longest sentence", default=None
    )
    max_epoch: Optional[int] = _key("last epoch; give this or max_update, or both", default=None)
    max_update: Optional[int] = _key("last update; give this or max_epoch, or both", 4000, default=None)
    seed: int = _key("random seed of initial values, order and dropout", default=1)
    precision: str = _key("numeric precision; auto: by the hardware", choices=PRECISIONS, default="auto")
    keep_last_epochs: int = _key("number of epoch checkpoints to keep", default=10)
    log_interval: int = _key("updates between two log lines", default=100)
    flags: Dict[str, Any] = _key(
        "flags of fairseq-train",
        {"optimizer": "adam", "lr": 0.001, "label-smoothing": 0.1},
        default_factory=dict,
    )


@dataclasses.dataclass
class Average:
    """The number of last checkpoints to average; null as the whole section: the best one is used."""

    epochs: Optional[int] = _key("number of epoch checkpoints", 5, default=None)
    updates: Optional[int] = _key("or number of train.flags.save-interval-updates checkpoints", default=None)

    @property
    def count(self) -> int:
        """Number of checkpoints in the average."""
        return self.epochs or self.updates or 0


@dataclasses.dataclass
class Generate:
    """Beam search; for translations only."""

    subsets: List[str] = _key("subsets to translate; the first is the recipe's result", ["test"])
    beam: int = _key("beam size (hypotheses per sentence)", 5)
    lenpen: float = _key("length penalty (exponent of the length that a score is divided by)", default=1.0)
    max_tokens: int = _key("most tokens per batch", default=4096)
    remove_bpe: bool = _key("join sub-words", default=True)
    flags: Dict[str, Any] = _key("flags of fairseq-generate", default_factory=dict)


@dataclasses.dataclass
class Score:
    """The numbers compared with the paper."""

    headline: str = _key("the metric", choices=HEADLINE_METRICS, default="multi_bleu")
    subsets: List[str] = _key(
        "language models and classifiers: subsets to score; the first is the recipe's result",
        default_factory=list,
    )
    flags: Dict[str, Any] = _key(
        "flags of moa-fairseq score; for lm_*: of fairseq-eval-lm", default_factory=dict
    )


@dataclasses.dataclass
class Recipe:
    """One experiment, from data to score. A null section leaves its stage out."""

    experiment: str = _key(
        "the file's own name, which is also the default; runs/ has a folder of that name",
        "recipe",
        default="",
        kw_only=True,
    )
    summary: str = _key("one line for readers", "every key of a recipe")
    data: Data = _key("")
    model: Model = _key("")
    train: Train = _key("")
    reproduces: Optional[Reproduces] = _key("", default=None)
    rows: Dict[str, Any] = _key(
        "other rows in this file: the row's name and the values that differ, `section.key: value` (--row)",
        default_factory=dict,
    )
    pretrained: Optional[str] = _key("run folder or checkpoint to fine-tune", default=None)
    finetune: Optional[str] = _key("fine-tuning method (MAE, Table 7)", choices=FINETUNING, default=None)
    average: Optional[Average] = _key("", default=None)
    generate: Optional[Generate] = _key("", default=None)
    score: Optional[Score] = _key("", default=None)
    zero_shot: Optional[List[str]] = _key(
        "of a causal language model, as its last stage: tasks of lm_eval such as lambada_openai, blimp and "
        "cbt",
        default=None,
    )

    @property
    def row(self) -> Optional[str]:
        """Its name in `rows`; None for the file's own row."""
        if self.reproduces and self.reproduces.row in self.rows:
            return self.reproduces.row
        return None

    @property
    def kind(self) -> str:
        """MASKED_LM, CAUSAL_LM, CLASSIFICATION or TRANSLATION, which determines the stages."""
        task = self.train.task
        return next((kind for beginning, kind in KINDS.items() if task.startswith(beginning)), TRANSLATION)

    @property
    def task_flags(self) -> Dict[str, Any]:
        """The task and its languages as flags of fairseq's programs."""
        pair = {"source-lang": self.data.source, "target-lang": self.data.target}
        return {"task": self.train.task, **(pair if self.kind == TRANSLATION else {})}

    @property
    def training_flags(self) -> Dict[str, Any]:
        """The flags of fairseq-train in `model.flags` and `train.flags`."""
        return {**self.model.flags, **self.train.flags}

    @property
    def training_inputs(self) -> Dict[str, Any]:
        """The settings that must not change between two starts of one training, except its data."""
        sections = {"model": dataclasses.asdict(self.model), "train": dataclasses.asdict(self.train)}
        for key in (*EXECUTION_KEYS, "max_epoch", "max_update"):
            del sections["train"][key]
        return as_of_today({"inputs": sections})["inputs"]

    @property
    def goal(self) -> Dict[str, Any]:
        """The end of the training."""
        said = self.training_flags
        stops = {name: said[name] for name in STOP_FLAGS if said.get(name) is not None}
        return {"max_epoch": self.train.max_epoch, "max_update": self.train.max_update, **stops}

    @property
    def averaged_interval(self) -> Optional[int]:
        """Updates between two of the checkpoints to average; None for epoch checkpoints."""
        if self.average and self.average.updates:
            return self.train.flags.get(INTERVAL)
        return None

    @property
    def subsets(self) -> List[str]:
        """The evaluated subsets, the recipe's result first."""
        if self.generate:
            return self.generate.subsets
        return self.score.subsets if self.score else []

    @property
    def splits(self) -> List[str]:
        """Parts of the data that the recipe needs."""
        return list(dict.fromkeys(["train", "valid", *self.subsets]))


def as_of_today(mark: Mapping[str, Any]) -> Dict[str, Any]:
    """A training's entry in state.json, converted if an earlier version counted more among its inputs."""
    if not isinstance(mark.get("inputs"), dict):
        return dict(mark)
    inputs = dict(mark["inputs"])
    # a damaged file may hold anything in their place
    facts, goal = (dict(mark[name]) if isinstance(mark.get(name), dict) else {} for name in ("facts", "goal"))
    stops = {}
    for name in ("model", "train"):
        if isinstance(section := inputs.get(name), dict) and isinstance(flags := section.get("flags"), dict):
            stops.update({key: flags[key] for key in STOP_FLAGS if flags.get(key) is not None})
            left_out = (*EXECUTION_FLAGS, *STOP_FLAGS)
            named = {key: value for key, value in flags.items() if key not in left_out}
            inputs[name] = {**section, "flags": named}
            if INTERVAL in flags:
                facts.setdefault(INTERVAL, flags[INTERVAL])
    return {**mark, "inputs": inputs, "facts": facts, "goal": {**stops, **goal}}


def problems(recipe: Recipe) -> Problems:
    """(key, problem) if keys contradict each other or a value is not allowed."""
    for rule in (_values, _average, _kind, _flags):
        yield from rule(recipe)


def reserved(section: str, flag: str) -> str:
    """Why a section's free flags must not include a flag; "" if they may.

    Args:
        section: one of SECTIONS.
        flag: its name, with dashes or underscores.
    """
    flag, key = flag.replace("_", "-"), flag.replace("-", "_")
    if flag in REFUSED:
        why = "with it fairseq would run a program, or write outside the run folder"
        return f"is forbidden: {why}. Leave it out."
    if section in ("model", "train") and flag in CANNOT_GO_ON:
        return f"prevents resuming: {CANNOT_GO_ON[flag]}. Leave it out."
    evaluates = section in ("generate", "score")
    if evaluates and flag in PARTIAL and (section, flag) != ("generate", SKIP):
        return "would limit the score to a part of the subset. Leave it out."
    if evaluates and flag in POSITIONS:
        return f"changes nothing in a trained model. Set model.flags.{flag} before the training."
    owners = {"model": (Model, Train), "train": (Model, Train), "generate": (Generate,)}.get(section, ())
    owner = next((kind for kind in owners if key in kind.__dataclass_fields__), None)
    if owner:
        instead = f"say {owner.__name__.lower()}.{key}"
    else:
        instead = "the runner sets it"
    free = flag not in OWN and not owner
    if free:
        return ""
    return f"is not a free flag; {_INSTEAD.get(flag, instead)}."


def _values(recipe: Recipe) -> Problems:
    data = recipe.data
    train = recipe.train
    model = recipe.model
    if not re.fullmatch(r"[a-z0-9_]+", recipe.experiment):
        yield "experiment", "use lower-case letters, digits and underscores only (it names folders)."
    for section in (*SECTIONS, "average"):
        values = getattr(recipe, section)
        for name, value in vars(values).items() if values else ():
            choices = values.__dataclass_fields__[name].metadata["choices"]
            if choices and value not in choices:
                yield f"{section}.{name}", f"{reprlib.repr(value)} is not one of {', '.join(choices)}."
            if isinstance(value, int) and not isinstance(value, bool):
                if abs(value) > LARGEST:
                    yield f"{section}.{name}", f"must not be above {LARGEST:,}."
                if value < 1 and name != "seed":
                    yield f"{section}.{name}", f"must be at least 1, not {value}."
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{section}.{name}", f"must be a number, not {value}."
    if not 0 <= train.seed < 2**32:  # as numpy takes them
        yield "train.seed", f"must be between 0 and {2**32 - 1:,}, not {train.seed}."
    names = [("data.source", data.source), ("data.target", data.target)]
    for section in ("generate", "score"):
        names += [(f"{section}.subsets", name) for name in getattr(getattr(recipe, section), "subsets", ())]
    names += [("zero_shot", name) for name in recipe.zero_shot or ()]
    for key, name in names:
        if name in ("True", "False"):
            yield key, "must be text. Quote it: YAML takes no, yes, on and off for truth values."
        if name is not None and not (isinstance(name, str) and FILE_NAME.fullmatch(name)):
            said = reprlib.repr(name)
            yield key, f"{said} is not a valid name. Use letters, digits, '_', '-' and '.' (for file names)."
    if model.share_all_embeddings and not data.joined_dictionary:
        remedy = "Set data.joined_dictionary: true, or model.share_all_embeddings: false."
        why = f"one embedding for both languages needs one dictionary for both. {remedy}"
        yield "model.share_all_embeddings", why
    if data.tokenize and not (data.recipe in datasets() and datasets()[data.recipe].takes_raw):
        if data.recipe in datasets():
            other = datasets()[data.recipe].raw
        else:
            other = ""
        remedy = f"Use data.recipe {other or 'parallel'}"
        yield "data.tokenize", f"{data.recipe} has no tokeniser for raw text. {remedy}, or leave it out."
    yield from _pieces(data)
    if data.bpe and data.codes:
        yield "data.codes", "gives merges, but data.bpe learns them. Set only one of the two keys."
    if data.train_fraction is not None and not 0 < data.train_fraction <= 1:
        yield "data.train_fraction", f"must be above 0 and at most 1, not {data.train_fraction}."
    if data.tokens and not (data.recipe in datasets() and datasets()[data.recipe].tokens):
        yield "data.tokens", f"data.recipe {data.recipe} is always used whole. Leave the key out."
    if train.max_epoch is None and train.max_update is None:
        yield "train.max_epoch", "is missing. Set max_epoch or max_update, otherwise training never ends."
    if recipe.generate and not recipe.generate.subsets:
        yield "generate.subsets", "is empty. Give at least one subset, such as [test]."


def _pieces(data: Data) -> Problems:
    """SentencePiece's settings, and keys that have no effect without it."""
    takes = ("parallel", "binarised")
    if (share := data.character_coverage) is not None:
        if data.segmentation != SENTENCEPIECE and data.recipe != "text_sp":
            yield "data.character_coverage", f"needs text_sp or data.segmentation: {SENTENCEPIECE}."
        elif not LEAST_COVERAGE <= share <= 1:
            yield "data.character_coverage", f"must be between {LEAST_COVERAGE} and 1, not {share}."
    if data.segmentation != SENTENCEPIECE:
        for key, default in (("piece_model", PIECE_MODELS[0]), ("byte_fallback", True)):
            if getattr(data, key) != default:
                yield f"data.{key}", f"needs data.segmentation: {SENTENCEPIECE}. Leave it out."
    elif data.recipe not in takes:
        why = f"{data.recipe} has a fixed segmentation"
        yield "data.segmentation", f"{why}; {SENTENCEPIECE} is for data.recipe {' and '.join(takes)}."
    elif data.recipe == "parallel" and not (data.bpe or data.codes):
        yield "data.bpe", f"is missing. {SENTENCEPIECE} needs the number of pieces, such as 8000."
    elif data.codes and not data.joined_dictionary:
        yield "data.codes", "is one model for both languages. Leave data.joined_dictionary: false out."


def _average(recipe: Recipe) -> Problems:
    average = recipe.average
    train = recipe.train
    if average is None:
        return
    epochs = average.epochs
    updates = average.updates
    if (epochs is None) == (updates is None):
        yield "average.epochs", "excludes average.updates. Set only one of them."
    if average.count < 2:
        remedy = "Use 2 or more, or average: null to evaluate the best checkpoint."
        key = f"average.{'epochs' if epochs else 'updates'}"
        yield key, f"one checkpoint is not an average. {remedy}"
    cannot = f"cannot average {epochs} epochs"
    if epochs and epochs > train.keep_last_epochs:
        yield "average.epochs", f"{cannot} when train.keep_last_epochs keeps {train.keep_last_epochs}."
    if epochs and train.max_epoch and epochs > train.max_epoch:
        yield "average.epochs", f"{cannot} of the {train.max_epoch} that train.max_epoch allows."
    saved, kept = (train.flags.get(f"{verb}-interval-updates") for verb in ("save", "keep"))
    if updates and (saved is None or (kept is not None and 0 <= kept < updates)):
        needs = "needs train.flags.save-interval-updates, and keep-interval-updates must not be below"
        yield "average.updates", f"{needs} {updates}."


def _kind(recipe: Recipe) -> Problems:
    """Required keys of translations, which have no meaning for other models, and the reverse."""
    data = recipe.data
    score = recipe.score
    task = recipe.train.task
    method = recipe.finetune
    kinds = (TRANSLATION, *KINDS)
    if not task.startswith(kinds):
        why = "is not a task of recipes: its name, also that of a task of your own, must begin with"
        known = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
        yield "train.task", f"{reprlib.repr(task)} {why} {known}. Use fairseq-train for others."
    if data.recipe != "binarised" and datasets()[data.recipe].kind != recipe.kind:
        yield "data.recipe", f"{data.recipe!r} makes no data for train.task {task!r}."
    metrics, name = _SCORED.get(recipe.kind, (tuple(beginning for beginning, _ in _SCORED.values()), ""))
    if recipe.zero_shot is not None:
        if recipe.kind != CAUSAL_LM:
            yield "zero_shot", "is for causal language models (train.task language_modeling): leave it out."
        if not recipe.zero_shot:
            yield "zero_shot", "is empty: name at least one task, such as [cbt], or leave it out."
    if score and score.headline.startswith(metrics) != bool(name):
        yield "score.headline", f"{score.headline!r} is not a score of train.task {task!r}."
    if name:
        keys = ["source", "target", "lowercase", "tokenize", "codes", "train_fraction"]
        if data.recipe != "text_sp":
            keys.append("bpe")
        unused = {f"data.{key}": getattr(data, key) for key in keys}
        for key, value in {**unused, "generate": recipe.generate}.items():
            if value:
                yield key, f"has no meaning for {name}. Leave it out."
        if score and not score.subsets:
            yield "score.subsets", "is empty. Give at least one subset, such as [test]."
    else:
        for key in ("source", "target"):
            if getattr(data, key) is None:
                yield f"data.{key}", "is missing. Give the language, such as en."
        if data.source == data.target:
            yield "data.target", f"source and target are both {data.source!r}."
        if score and not recipe.generate:
            yield "score", "needs a generate section."
        if score and score.subsets:
            yield "score.subsets", "has no meaning for a translation. Set generate.subsets."
    if (recipe.pretrained is None) != (method is None):
        why = "is missing. `pretrained` gives the model and `finetune` the fine-tuning method."
        yield "finetune" if method is None else "pretrained", why
    if method is not None and method not in FINETUNING:
        yield "finetune", f"{method!r} is not one of {', '.join(FINETUNING)}."
    if method is not None and not (task.endswith("_bcd") and recipe.kind == TRANSLATION):
        yield "finetune", f"needs train.task translation_bcd, not {task}."


def _flags(recipe: Recipe) -> Problems:
    """Rules for all flags; `loading.check_flags` checks each program's own flags."""
    free = {section: values.flags for section in SECTIONS if (values := getattr(recipe, section))}
    for section, name, value in ((s, name, value) for s in free for name, value in free[s].items()):
        key = f"{section}.flags.{name}"
        if not FLAG_NAME.fullmatch(name):
            proper = name[:100].lower().replace("_", "-").lstrip("-")
            yield key, f"write flags as on the command line, without the leading dashes: {proper}."
        if value is not None and (why := reserved(section, name)):
            yield key, why
        if name == "model-overrides" and value is not None:
            try:
                dictionary = isinstance(ast.literal_eval(value), dict)
            # as literal_eval documents
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                dictionary = False
            if not dictionary:
                yield key, f"{reprlib.repr(value)} is not a dictionary, such as \"{{'dropout': 0}}\"."
        if isinstance(value, str):
            path = Path(value)
        else:
            path = Path("/")
        if name == "tensorboard-logdir" and (path.is_absolute() or ".." in path.parts):
            yield key, f"{reprlib.repr(value)} is not a folder inside the run folder, such as logs."
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and abs(item) > LARGEST:
                yield key, f"must not be above {LARGEST:,}."
            if isinstance(item, float) and math.isnan(item):
                yield key, "must be a number, not nan."
            if not isinstance(item, (str, int, float, type(None))):  # and bool, which is an int
                kinds = "text, a number, true, false, null or a flat list of these"
                yield key, f"a flag's value must be {kinds}, not {reprlib.repr(item)}."
        if problem := unsafe_value(value):
            yield key, problem
    for name in recipe.model.flags.keys() & recipe.train.flags.keys():
        model, train = (reprlib.repr(values[name]) for values in (recipe.model.flags, recipe.train.flags))
        if model != train:
            why = f"is {model}, but train.flags.{name}, which has precedence, is {train}"
            yield f"model.flags.{name}", f"{why}. Set the flag in one of the two."
