"""The contents of a recipe file: the sections, their keys and types."""

import dataclasses
from typing import Any, Dict, Iterable, List, Optional

from moa_fairseq.experiments.data.catalogue import (
    CLASSIFICATION,
    MASKED_LM,
    SENTENCEPIECE,
    SUBWORD_NMT,
    TRANSLATION,
    datasets,
)
from moa_fairseq.experiments.data.catalogue import LANGUAGE_MODELING as CAUSAL_LM

Flags = Dict[str, Any]  # a flag without its dashes → its value
DATA_RECIPES = ("binarised", *(name for name, data in datasets().items() if data.encoder != "none"))
SEGMENTATIONS = (SUBWORD_NMT, SENTENCEPIECE)
PIECE_MODELS = ("unigram", "bpe")
PRECISIONS = ("auto", "fp32", "fp16", "bf16", "amp")
HEADLINE_METRICS = (
    "multi_bleu",
    "compound_split_bleu",
    "sacrebleu",
    "get_ende_bleu",
    "moa_release_bleu",
    "masked_lm_ppl",
    "masked_lm_text_ppl",
    "masked_lm_word_ppl",
    "lm_ppl",
    "lm_bits",
    "accuracy",
)
FINETUNING = ("noft", "ftg", "ftg_plus", "ftall")  # values of `finetune` (MAE, section 5.2)
# The types of recipes by the beginning of train.task; any other task is a translation.
KINDS = {
    "masked_lm": MASKED_LM,
    "language_modeling": CAUSAL_LM,
    "sentence_prediction": CLASSIFICATION,
}

# A translation may have this flag: its result gives the number of skipped sentences.
SKIP = "skip-invalid-size-inputs-valid-test"
POSITIONS = ("max-source-positions", "max-target-positions")
LARGEST = 2**63 - 1  # largest whole number in torch
SECTIONS = ("data", "model", "train", "generate", "score")
# Settings of how a training runs, not of what it computes. A run may change them between two starts
# and still reproduce its row of the paper: keys of `train`, and flags of fairseq-train.
EXECUTION_KEYS = ("max_tokens", "min_tokens", "precision", "keep_last_epochs", "log_interval")
EXECUTION_FLAGS = (
    # communication between processes, and the share of each
    "ddp-backend",
    "ddp-comm-hook",
    "bucket-cap-mb",
    "gradient-as-bucket-view",
    "find-unused-parameters",
    "heartbeat-timeout",
    "zero-sharding",
    "cpu-offload",
    "no-reshard-after-forward",
    "fp32-reduce-scatter",
    "min-params-to-wrap",
    # memory against time
    "checkpoint-activations",
    "memory-efficient-fp16",
    "memory-efficient-bf16",
    "fp16-no-flatten-grads",
    "fp16-init-scale",
    "fp16-scale-window",
    # data loading and logs
    "num-workers",
    "data-buffer-size",
    "tensorboard-logdir",
    "wandb-project",
    # saved checkpoints: their requirements are checked elsewhere
    "save-interval",
    "save-interval-updates",
    "keep-interval-updates",
    "keep-interval-updates-pattern",
    "keep-best-checkpoints",
    "no-epoch-checkpoints",
    "load-checkpoint-on-all-dp-ranks",
    # kernels
    "no-kernel-check",
    "compile-layers",
)
INTERVAL = "save-interval-updates"
# The end of a training, in addition to its max_epoch and max_update: it may be later at the next start.
STOP_FLAGS = ("patience", "stop-time-hours", "stop-min-lr")


def _key(text: str, example: Any = None, choices: Iterable[str] = (), **default: Any) -> Any:
    """A key of a section; docs/recipe.yaml shows its description (text, choices) and the example."""
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
    """The text, and how it becomes a binarised folder."""

    recipe: str = _key("source of the text", "parallel", DATA_RECIPES)
    source: Optional[str] = _key(
        "language; not for language models and classifiers", "fr", default=None
    )
    target: Optional[str] = _key(
        "language; not for language models and classifiers", "en", default=None
    )
    bpe: Optional[int] = _key(
        "number of joint BPE merges to learn on the training text (text_sp and sentencepiece: of pieces); "
        "null "
        "for segmented text",
        8000,
        default=None,
    )
    codes: Optional[str] = _key(
        "file of BPE merges, or a SentencePiece model, learned elsewhere; replaces bpe",
        default=None,
    )
    segmentation: str = _key(
        "segmentation of parallel and binarised text; sentencepiece reads raw text without a tokeniser",
        choices=SEGMENTATIONS,
        default=SUBWORD_NMT,
    )
    piece_model: str = _key("SentencePiece model type", choices=PIECE_MODELS, default="unigram")
    byte_fallback: bool = _key(
        "sentencepiece: split letters without a piece into bytes, so that none is unknown",
        default=True,
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
        "whether your own text is raw and must be tokenised; null: raw text is an error",
        True,
        default=None,
    )
    train_fraction: Optional[float] = _key(
        "fraction of the training pairs to use, in (0, 1]; smaller fractions are subsets",
        default=None,
    )
    train_fraction_seed: int = _key("random seed of the fraction", default=1)
    tokens: Optional[int] = _key(
        "c4 and pes2o: number of training tokens, from the beginning; null: the data set's number",
        default=None,
    )
    flags: Flags = _key("flags of fairseq-preprocess", {"workers": 2}, default_factory=dict)

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
    share_all_embeddings: bool = _key(
        "one embedding for encoder, decoder and output", True, default=False
    )
    flags: Flags = _key(
        "flags of fairseq-train (docs/flags.md)", {"dropout": 0.3}, default_factory=dict
    )

    def as_flags(self) -> Flags:
        """The whole section as flags of fairseq-train."""
        settings = {
            name.replace("_", "-"): value for name, value in vars(self).items() if name != "flags"
        }
        return settings | self.flags


@dataclasses.dataclass
class Train:
    """Optimisation."""

    max_tokens: int = _key("most tokens per device and step, including padding", 4096)
    criterion: str = _key(
        "fairseq-train's --criterion", "label_smoothed_cross_entropy_with_routing"
    )
    task: str = _key("fairseq-train's --task", default="translation")
    effective_batch_tokens: Optional[int] = _key(
        "tokens per update over all devices and accumulation steps, including padding",
        4096,
        default=None,
    )
    min_tokens: Optional[int] = _key(
        "fewest tokens per device and step; null: the length of the longest sentence", default=None
    )
    max_epoch: Optional[int] = _key("last epoch; give this or max_update, or both", default=None)
    max_update: Optional[int] = _key(
        "last update; give this or max_epoch, or both", 4000, default=None
    )
    seed: int = _key("random seed of initial values, order and dropout", default=1)
    precision: str = _key(
        "numeric precision; auto: by the hardware", choices=PRECISIONS, default="auto"
    )
    keep_last_epochs: int = _key("number of epoch checkpoints to keep", default=10)
    log_interval: int = _key("updates between two log lines", default=100)
    flags: Flags = _key(
        "flags of fairseq-train",
        {"optimizer": "adam", "lr": 0.001, "label-smoothing": 0.1},
        default_factory=dict,
    )


@dataclasses.dataclass
class Average:
    """The number of last checkpoints to average; if the whole section is null, the best one is used."""

    epochs: Optional[int] = _key("number of epoch checkpoints", 5, default=None)
    updates: Optional[int] = _key(
        "or number of train.flags.save-interval-updates checkpoints", default=None
    )

    @property
    def count(self) -> int:
        """The number of checkpoints in the average."""
        return self.epochs or self.updates or 0


@dataclasses.dataclass
class Generate:
    """Beam search; for translations only."""

    subsets: List[str] = _key("subsets to translate; the first is the recipe's result", ["test"])
    beam: int = _key("beam size (hypotheses per sentence)", 5)
    lenpen: float = _key(
        "length penalty (exponent of the length that a score is divided by)", default=1.0
    )
    max_tokens: int = _key("most tokens per batch", default=4096)
    remove_bpe: bool = _key("join sub-words", default=True)
    flags: Flags = _key("flags of fairseq-generate", default_factory=dict)


@dataclasses.dataclass
class Score:
    """The numbers compared with the paper."""

    headline: str = _key("the metric", choices=HEADLINE_METRICS, default="multi_bleu")
    subsets: List[str] = _key(
        "language models and classifiers: subsets to score; the first is the recipe's result",
        default_factory=list,
    )
    flags: Flags = _key(
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
    finetune: Optional[str] = _key(
        "fine-tuning method (MAE, Table 7)", choices=FINETUNING, default=None
    )
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
        """The name of the reproduced row in `rows`; None for the file's own row."""
        if self.reproduces and self.reproduces.row in self.rows:
            return self.reproduces.row
        return None

    @property
    def kind(self) -> str:
        """MASKED_LM, CAUSAL_LM, CLASSIFICATION or TRANSLATION, which determines the stages."""
        task = self.train.task
        for beginning, kind in KINDS.items():
            if task.startswith(beginning):
                return kind
        return TRANSLATION

    @property
    def task_flags(self) -> Flags:
        """The task and its languages as flags of fairseq's programs."""
        flags: Flags = {"task": self.train.task}
        if self.kind == TRANSLATION:
            flags.update({"source-lang": self.data.source, "target-lang": self.data.target})
        return flags

    @property
    def training_flags(self) -> Flags:
        """The flags of fairseq-train in `model.flags` and `train.flags`."""
        return self.model.flags | self.train.flags

    @property
    def training_inputs(self) -> Dict[str, Any]:
        """The settings that must not change between two starts of one training, except its data."""
        model = dataclasses.asdict(self.model)
        train = dataclasses.asdict(self.train)
        for section in (model, train):
            section["flags"] = computation_flags(section["flags"])
        for key in (*EXECUTION_KEYS, "max_epoch", "max_update"):
            del train[key]
        return {"model": model, "train": train}

    @property
    def goal(self) -> Dict[str, Any]:
        """The settings that end the training; a later start may change them."""
        flags = self.training_flags
        stops = {name: flags[name] for name in STOP_FLAGS if flags.get(name) is not None}
        return {"max_epoch": self.train.max_epoch, "max_update": self.train.max_update} | stops

    @property
    def averaged_interval(self) -> Optional[int]:
        """The number of updates between two checkpoints to average; None for epoch checkpoints."""
        if self.average and self.average.updates:
            return self.train.flags.get(INTERVAL)
        return None

    @property
    def subsets(self) -> List[str]:
        """The evaluated subsets; the first gives the recipe's result."""
        if self.generate:
            return self.generate.subsets
        return self.score.subsets if self.score else []

    @property
    def splits(self) -> List[str]:
        """The splits of the data that the recipe needs."""
        return list(dict.fromkeys(["train", "valid", *self.subsets]))


def computation_flags(flags: Flags) -> Flags:
    """The flags that decide what a training computes, except its end."""
    left_out = (*EXECUTION_FLAGS, *STOP_FLAGS)
    return {key: value for key, value in flags.items() if key not in left_out}
