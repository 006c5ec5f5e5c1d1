"""What a recipe file may say: the sections, their keys and types, and the rules that tie keys together."""

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
FINETUNING = ("noft", "ftg", "ftg_plus", "ftall")  # what `finetune` may say (MAE, section 5.2)
# The kinds of recipes by the beginning of train.task; any other task is a translation.
KINDS = {"masked_lm": MASKED_LM, "language_modeling": CAUSAL_LM, "sentence_prediction": CLASSIFICATION}

# Models that are scored straight from checkpoints: the beginning of their headline metrics, their name.
_SCORED = {
    MASKED_LM: ("masked_lm_", "a masked language model"),
    CAUSAL_LM: ("lm_", "a causal language model"),
    CLASSIFICATION: ("accuracy", "a classifier"),
}
# What no section may set: recipes are passed on, and the reader of one expects its run folder to be written.
REFUSED = (
    *("post-save-script", "use-plasma-view", "plasma-path"),
    *("log-file", "results-path", "save-predictions", "checkpoint-suffix", "aim-repo"),
)
# What the runner sets itself, and for whole sections: what their keys say.
OWN = (
    *("user-dir", "save-dir", "destdir", "path", "gen-subset", "subset", "data", "json", "masked-lm"),
    *("classifier", "cpu", "log-format", "no-progress-bar", "update-freq", "fp16", "bf16", "amp"),
    *("device-id", "joined-dictionary", "source-lang", "target-lang"),
    *(f"distributed-{x}" for x in ("world-size", "rank", "init-method", "port", "no-spawn", "num-procs")),
)
_INSTEAD = {
    **dict.fromkeys(("fp16", "bf16", "amp"), "say train.precision"),
    "update-freq": "it follows from train.effective_batch_tokens",
    "gen-subset": "say generate.subsets",
    "subset": "say score.subsets",
}
# With these an evaluation is one of fewer sentences, or none changes what the model reads. Of a translation
# the first one is free: its result tells how many are left out.
SKIP = "skip-invalid-size-inputs-valid-test"
PARTIAL = (SKIP, "num-shards", "shard-id", "shorten-method")
POSITIONS = ("max-source-positions", "max-target-positions")
LARGEST = 2**63 - 1  # what fits into the whole numbers of torch
SECTIONS = ("data", "model", "train", "generate", "score")
FLAG_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
FILE_NAME = re.compile(r"\w[\w.-]*")  # what stands in the names of files: a language, a subset
Problems = Iterator[Tuple[str, str]]
# What says how a training is carried out and not what it computes. A run may change it between two starts,
# and with it still stands for its row of the paper: keys of `train`, and flags of fairseq-train.
EXECUTION_KEYS = ("max_tokens", "min_tokens", "precision", "keep_last_epochs", "log_interval")
EXECUTION_FLAGS = (
    # how processes talk and what each of them holds
    *("ddp-backend", "ddp-comm-hook", "bucket-cap-mb", "gradient-as-bucket-view", "find-unused-parameters"),
    *("heartbeat-timeout", "zero-sharding", "cpu-offload", "no-reshard-after-forward", "fp32-reduce-scatter"),
    "min-params-to-wrap",
    # memory against time
    *("checkpoint-activations", "memory-efficient-fp16", "memory-efficient-bf16", "fp16-no-flatten-grads"),
    *("fp16-init-scale", "fp16-scale-window"),
    # data loading and logs
    *("num-workers", "data-buffer-size", "tensorboard-logdir", "wandb-project"),
    # which checkpoints are written: what they are needed for comes after the training
    *("save-interval", "save-interval-updates", "keep-interval-updates", "keep-interval-updates-pattern"),
    *("keep-best-checkpoints", "no-epoch-checkpoints", "load-checkpoint-on-all-dp-ranks"),
    *("no-kernel-check", "compile-layers"),
)
INTERVAL = "save-interval-updates"
# How far a training goes, beside its max_epoch and max_update: it may go further at its next start.
STOP_FLAGS = ("patience", "stop-time-hours", "stop-min-lr")
# What fairseq-train would do again at each start, or would not find there: no run of a recipe could go on.
_ONCE = "it would be done again at every start, and what was trained be lost"
_FROM = "to begin with the weights of a model, say train.flags.finetune-from-model, which does it once"
_NOTHING = "a run goes on from the last checkpoint and is evaluated by what it saved"
CANNOT_GO_ON = {
    "restore-file": f"{_ONCE}; {_FROM}",
    "reset-optimizer": f"{_ONCE}; {_FROM}, with an optimizer of its own",
    "reset-lr-scheduler": f"{_ONCE}; {_FROM}, with a schedule of its own",
    "reset-meters": f"{_ONCE}; {_FROM}",
    "reset-dataloader": f"{_ONCE}; {_FROM}, and with the first epoch",
    "optimizer-overrides": "a run that was interrupted would train otherwise than one that was not; say the "
    "values themselves, such as train.flags.lr",
    "no-save": f"{_NOTHING}; for fewer files say train.flags.no-epoch-checkpoints",
    "no-last-checkpoints": f"{_NOTHING}; for fewer files say train.flags.no-epoch-checkpoints",
    "use-sharded-state": f"{_NOTHING}, one file; leave it out, and fairseq gathers the shards",
    "use-bmuf": "its momentum is in no checkpoint, and lost at every start",
}


def _key(text: str, example: Any = None, choices: Iterable[str] = (), **default: Any) -> Any:
    """A key of a section. text, choices: what docs/recipe.yaml says of it; example: its value there."""
    metadata = {"text": text, "example": example, "choices": tuple(choices)}
    return dataclasses.field(metadata=metadata, **default)


@dataclasses.dataclass
class Reproduces:
    """The published number that the recipe stands for: which cell of which table of which paper."""

    paper: str = _key("file of results/papers/", "moa")
    table: str = _key("its number there", "1")
    row: str = _key("the row's name", "MoA Base (8K8E128D)")
    column: str = _key("the column's name", "WMT14 EnDe BLEU")
    value: Optional[float] = _key("the printed number", 28.4, default=None)


@dataclasses.dataclass
class Data:
    """Which text, and how it becomes a binarised folder."""

    recipe: str = _key("where the text comes from", "parallel", DATA_RECIPES)
    source: Optional[str] = _key("language; not for language models and classifiers", "fr", default=None)
    target: Optional[str] = _key("language; not for language models and classifiers", "en", default=None)
    bpe: Optional[int] = _key(
        "joint merges to learn on the training text (of text_sp and sentencepiece: pieces); null where it is "
        "segmented already",
        8000,
        default=None,
    )
    codes: Optional[str] = _key(
        "a file of merges, or SentencePiece's model, learned elsewhere, in place of bpe", default=None
    )
    segmentation: str = _key(
        "of parallel and binarised text; sentencepiece takes raw text and needs no tokeniser",
        choices=SEGMENTATIONS,
        default=SUBWORD_NMT,
    )
    piece_model: str = _key("of sentencepiece", choices=PIECE_MODELS, default="unigram")
    byte_fallback: bool = _key(
        "of sentencepiece: letters without a piece become bytes, and none is unknown", default=True
    )
    character_coverage: Optional[float] = _key(
        "of text_sp and sentencepiece: share of the letters of the training text that get a piece; null: "
        "0.9995, without bytes 1",
        default=None,
    )
    allow_unknown: bool = _key(
        "take training text of which more than 5 % of the pieces are <unk>", default=False
    )
    joined_dictionary: bool = _key(
        "one dictionary for both languages, of sentencepiece one model", default=True
    )
    lowercase: bool = _key("the text in lower case", default=False)
    tokenize: Optional[bool] = _key(
        "of text of your own: whether it is raw; unless said, raw text is an error", True, default=None
    )
    train_fraction: Optional[float] = _key(
        "part of the training pairs that is used, in (0, 1]; a smaller part lies in a larger", default=None
    )
    train_fraction_seed: int = _key("draws the part", default=1)
    tokens: Optional[int] = _key(
        "of c4 and pes2o: tokens of the training text, from its beginning; null: the data set's number",
        default=None,
    )
    flags: Dict[str, Any] = _key("flags of fairseq-preprocess", {"workers": 2}, default_factory=dict)

    @property
    def running_text(self) -> bool:
        """True where decoded text is as it was before any tokeniser: it is scored as it stands."""
        return self.segmentation == SENTENCEPIECE and not self.tokenize


@dataclasses.dataclass
class Model:
    """The architecture and, for mixtures of attention heads, their sizes."""

    arch: str = _key(
        "fairseq-train's --arch: docs/flags.md lists those of this package", "moa_transformer_tiny"
    )
    num_experts: Optional[int] = _key("E: experts of a layer", 8, default=None)
    experts_per_token: Optional[int] = _key("K: experts chosen for a token", 4, default=None)
    expert_dim: Optional[int] = _key("D: width of an expert's head", 48, default=None)
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

    max_tokens: int = _key("most tokens on one device at once, padding included", 4096)
    criterion: str = _key("fairseq-train's --criterion", "label_smoothed_cross_entropy_with_routing")
    task: str = _key("fairseq-train's --task", default="translation")
    effective_batch_tokens: Optional[int] = _key(
        "tokens of one update over all devices and accumulation steps, padding included", 4096, default=None
    )
    min_tokens: Optional[int] = _key(
        "fewest tokens on one device at once; null: as many as the longest sentence has", default=None
    )
    max_epoch: Optional[int] = _key("where the training ends; at least one of the two", default=None)
    max_update: Optional[int] = _key("where the training ends; at least one of the two", 4000, default=None)
    seed: int = _key("of initial values, order and dropout", default=1)
    precision: str = _key("auto: what suits the hardware", choices=PRECISIONS, default="auto")
    keep_last_epochs: int = _key("checkpoints that stay", default=10)
    log_interval: int = _key("updates between two lines of the log", default=100)
    flags: Dict[str, Any] = _key(
        "flags of fairseq-train",
        {"optimizer": "adam", "lr": 0.001, "label-smoothing": 0.1},
        default_factory=dict,
    )


@dataclasses.dataclass
class Average:
    """Which checkpoints are averaged, the last ones; null as the whole section: the best one is used."""

    epochs: Optional[int] = _key("how many of epochs", 5, default=None)
    updates: Optional[int] = _key("or how many of train.flags.save-interval-updates", default=None)

    @property
    def count(self) -> int:
        """Number of checkpoints in the average."""
        return self.epochs or self.updates or 0


@dataclasses.dataclass
class Generate:
    """Beam search; for translations only."""

    subsets: List[str] = _key("what is translated; the first is the recipe's result", ["test"])
    beam: int = _key("hypotheses kept a sentence", 5)
    lenpen: float = _key("exponent of the length that a score is divided by", default=1.0)
    max_tokens: int = _key("most tokens at once", default=4096)
    remove_bpe: bool = _key("whether sub-words are joined", default=True)
    flags: Dict[str, Any] = _key("flags of fairseq-generate", default_factory=dict)


@dataclasses.dataclass
class Score:
    """What is compared with the paper."""

    headline: str = _key("the metric", choices=HEADLINE_METRICS, default="multi_bleu")
    subsets: List[str] = _key(
        "of a language model or classifier: what is scored, the first being the recipe's result",
        default_factory=list,
    )
    flags: Dict[str, Any] = _key(
        "flags of moa-fairseq score; for lm_*: of fairseq-eval-lm", default_factory=dict
    )


@dataclasses.dataclass
class Recipe:
    """One experiment, from data to score. A section that is null is a stage left out."""

    experiment: str = _key(
        "the file's own name, also where it is not said; runs/ has a folder of that name",
        "recipe",
        default="",
        kw_only=True,
    )
    summary: str = _key("one line that a reader sees", "every key of a recipe")
    data: Data = _key("")
    model: Model = _key("")
    train: Train = _key("")
    reproduces: Optional[Reproduces] = _key("", default=None)
    rows: Dict[str, Any] = _key(
        "other rows that the file stands for: the row's name and what differs, `section.key: value` (--row)",
        default_factory=dict,
    )
    pretrained: Optional[str] = _key("a run folder or a checkpoint to fine-tune", default=None)
    finetune: Optional[str] = _key("how it is fine-tuned (MAE, Table 7)", choices=FINETUNING, default=None)
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
        """Which of `rows` it is; None for the file's own row."""
        if self.reproduces and self.reproduces.row in self.rows:
            return self.reproduces.row
        return None

    @property
    def kind(self) -> str:
        """MASKED_LM, CAUSAL_LM, CLASSIFICATION or TRANSLATION: it decides which stages there are."""
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
        """What must not change between two starts of one training, its data aside."""
        sections = {"model": dataclasses.asdict(self.model), "train": dataclasses.asdict(self.train)}
        for key in (*EXECUTION_KEYS, "max_epoch", "max_update"):
            del sections["train"][key]
        return as_of_today({"inputs": sections})["inputs"]

    @property
    def goal(self) -> Dict[str, Any]:
        """How far the training goes."""
        said = self.training_flags
        stops = {name: said[name] for name in STOP_FLAGS if said.get(name) is not None}
        return {"max_epoch": self.train.max_epoch, "max_update": self.train.max_update, **stops}

    @property
    def averaged_interval(self) -> Optional[int]:
        """Updates between two of the checkpoints that are averaged, where these are not of epochs."""
        if self.average and self.average.updates:
            return self.train.flags.get(INTERVAL)
        return None

    @property
    def subsets(self) -> List[str]:
        """What is evaluated, the recipe's result first."""
        if self.generate:
            return self.generate.subsets
        return self.score.subsets if self.score else []

    @property
    def splits(self) -> List[str]:
        """Parts of the data that the recipe needs."""
        return list(dict.fromkeys(["train", "valid", *self.subsets]))


def as_of_today(mark: Mapping[str, Any]) -> Dict[str, Any]:
    """What state.json says of a training, also where an earlier version counted more among its inputs."""
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
    """(key, what is wrong with it), where keys contradict each other or a value is not allowed."""
    for rule in (_values, _average, _kind, _flags):
        yield from rule(recipe)


def reserved(section: str, flag: str) -> str:
    """Why a section's free flags must not hold this one; "" if they may.

    Args:
        section: one of SECTIONS.
        flag: its name, with dashes or underscores.
    """
    flag, key = flag.replace("_", "-"), flag.replace("-", "_")
    if flag in REFUSED:
        why = "fairseq would run a program for it, or write outside of the run folder"
        return f"{why}, which a recipe must not decide: leave it out."
    if section in ("model", "train") and flag in CANNOT_GO_ON:
        return f"{CANNOT_GO_ON[flag]}. Leave it out."
    evaluates = section in ("generate", "score")
    if evaluates and flag in PARTIAL and (section, flag) != ("generate", SKIP):
        return "would make the score one of a part of the subset: leave it out."
    if evaluates and flag in POSITIONS:
        return f"changes nothing in a trained model: say model.flags.{flag} before the training."
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
        yield "train.seed", f"must lie between 0 and {2**32 - 1:,}, not {train.seed}."
    names = [("data.source", data.source), ("data.target", data.target)]
    for section in ("generate", "score"):
        names += [(f"{section}.subsets", name) for name in getattr(getattr(recipe, section), "subsets", ())]
    names += [("zero_shot", name) for name in recipe.zero_shot or ()]
    for key, name in names:
        if name in ("True", "False"):
            yield key, "must be text: put it in quotes, as YAML takes no, yes, on and off for a truth value."
        if name is not None and not (isinstance(name, str) and FILE_NAME.fullmatch(name)):
            said = reprlib.repr(name)
            yield key, f"{said} is not a name: use letters, digits, '_', '-' and '.' (files bear it)."
    if model.share_all_embeddings and not data.joined_dictionary:
        remedy = "set data.joined_dictionary: true, or model.share_all_embeddings: false."
        why = f"one embedding for both languages needs one dictionary for both: {remedy}"
        yield "model.share_all_embeddings", why
    if data.tokenize and not (data.recipe in datasets() and datasets()[data.recipe].takes_raw):
        if data.recipe in datasets():
            other = datasets()[data.recipe].raw
        else:
            other = ""
        remedy = f"use data.recipe {other or 'parallel'}"
        yield "data.tokenize", f"{data.recipe} has no tokeniser for raw text: {remedy}, or leave it out."
    yield from _pieces(data)
    if data.bpe and data.codes:
        yield "data.codes", "the merges are learned (data.bpe) or given (data.codes), not both."
    if data.train_fraction is not None and not 0 < data.train_fraction <= 1:
        yield "data.train_fraction", f"must lie above 0 and not above 1, not {data.train_fraction}."
    if data.tokens and not (data.recipe in datasets() and datasets()[data.recipe].tokens):
        yield "data.tokens", f"data.recipe {data.recipe} is used whole: leave it out."
    if train.max_epoch is None and train.max_update is None:
        yield "train.max_epoch", "is missing: say max_epoch or max_update, or training never ends."
    if recipe.generate and not recipe.generate.subsets:
        yield "generate.subsets", "is empty: name at least one subset, such as [test]."


def _pieces(data: Data) -> Problems:
    """What SentencePiece needs, and what is not read without it."""
    takes = ("parallel", "binarised")
    if (share := data.character_coverage) is not None:
        if data.segmentation != SENTENCEPIECE and data.recipe != "text_sp":
            yield "data.character_coverage", f"is of text_sp and of data.segmentation: {SENTENCEPIECE} alone."
        elif not LEAST_COVERAGE <= share <= 1:
            yield "data.character_coverage", f"must lie between {LEAST_COVERAGE} and 1, not {share}."
    if data.segmentation != SENTENCEPIECE:
        for key, default in (("piece_model", PIECE_MODELS[0]), ("byte_fallback", True)):
            if getattr(data, key) != default:
                yield f"data.{key}", f"is read with data.segmentation: {SENTENCEPIECE} alone: leave it out."
    elif data.recipe not in takes:
        why = f"{data.recipe} has a segmentation of its own"
        yield "data.segmentation", f"{why}; {SENTENCEPIECE} is for data.recipe {' and '.join(takes)}."
    elif data.recipe == "parallel" and not (data.bpe or data.codes):
        yield "data.bpe", f"is missing: {SENTENCEPIECE} needs the number of pieces, such as 8000."
    elif data.codes and not data.joined_dictionary:
        yield "data.codes", "is one model for both languages: leave data.joined_dictionary: false out."


def _average(recipe: Recipe) -> Problems:
    average = recipe.average
    train = recipe.train
    if average is None:
        return
    epochs = average.epochs
    updates = average.updates
    if (epochs is None) == (updates is None):
        yield "average.epochs", "say either average.epochs or average.updates."
    if average.count < 2:
        remedy = "use 2 or more, or average: null to evaluate the best checkpoint."
        key = f"average.{'epochs' if epochs else 'updates'}"
        yield key, f"one checkpoint is not an average: {remedy}"
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
    """What a translation needs and other models have no use for, and the other way round."""
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
                yield key, f"has no meaning for {name}: leave it out."
        if score and not score.subsets:
            yield "score.subsets", "is empty: name at least one subset, such as [test]."
    else:
        for key in ("source", "target"):
            if getattr(data, key) is None:
                yield f"data.{key}", "is missing: name the language, such as en."
        if data.source == data.target:
            yield "data.target", f"source and target are both {data.source!r}."
        if score and not recipe.generate:
            yield "score", "needs a generate section."
        if score and score.subsets:
            yield "score.subsets", "say generate.subsets."
    if (recipe.pretrained is None) != (method is None):
        why = "is missing: `pretrained` names the model and `finetune` says how it is fine-tuned."
        yield "finetune" if method is None else "pretrained", why
    if method is not None and method not in FINETUNING:
        yield "finetune", f"{method!r} is not one of {', '.join(FINETUNING)}."
    if method is not None and not (task.endswith("_bcd") and recipe.kind == TRANSLATION):
        yield "finetune", f"needs train.task translation_bcd, not {task}."


def _flags(recipe: Recipe) -> Problems:
    """What holds of any flag; `loading.check_flags` asks the programs about their own."""
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
            yield key, f"{reprlib.repr(value)} is not a folder inside of the run folder, such as logs."
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and abs(item) > LARGEST:
                yield key, f"must not be above {LARGEST:,}."
            if isinstance(item, float) and math.isnan(item):
                yield key, "must be a number, not nan."
            if not isinstance(item, (str, int, float, type(None))):  # and bool, which is an int
                kinds = "text, a number, true, false, null or a flat list of these"
                yield key, f"a flag's value is {kinds}, not {reprlib.repr(item)}."
        if problem := unsafe_value(value):
            yield key, problem
    for name in recipe.model.flags.keys() & recipe.train.flags.keys():
        model, train = (reprlib.repr(values[name]) for values in (recipe.model.flags, recipe.train.flags))
        if model != train:
            why = f"{model}, and train.flags.{name} {train}, which would be taken"
            yield f"model.flags.{name}", f"{why}: say the flag in one of the two."
