"""What a recipe file may say: the sections, their keys and types."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Sequence

from moa_fairseq.data_prep.catalogue import CLASSIFICATION, MASKED_LM, TRANSLATION, datasets
from moa_fairseq.data_prep.catalogue import LANGUAGE_MODELING as CAUSAL_LM

DATA_RECIPES = ("binarised", *(name for name, data in datasets().items() if data.encoder != "none"))
PRECISIONS = ("auto", "fp32", "fp16", "bf16", "amp")
HEADLINE_METRICS = (
    *("multi_bleu", "compound_split_bleu", "sacrebleu", "get_ende_bleu", "moa_release_bleu"),
    *("masked_lm_ppl", "masked_lm_text_ppl", "masked_lm_word_ppl", "lm_ppl", "lm_bits"),
    "accuracy",
)
# What `finetune` may say (MAE, section 5.2), and the row of the paper's Table 7 that it stands for.
FINETUNING = {"noft": "NOFT", "ftg": "FTG", "ftg_plus": "FTG+", "ftall": "FTALL"}
# The kinds of recipes by the beginning of train.task; any other task is a translation.
KINDS = {"masked_lm": MASKED_LM, "language_modeling": CAUSAL_LM, "sentence_prediction": CLASSIFICATION}

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
)
# How often a checkpoint is written; part of the experiment where these are the ones that are averaged.
INTERVAL_FLAGS = ("save-interval-updates", "keep-interval-updates")


@dataclasses.dataclass
class Reproduces:
    """The published number that the recipe stands for: which cell of which table of which paper."""

    paper: str
    table: str
    row: str
    column: str
    value: Optional[float] = None


@dataclasses.dataclass
class Data:
    """Which text, and how it becomes a binarised folder.

    source, target: languages; left out for language models and classifiers. bpe: number of joint merges to
    learn on the training text, or None when the text is segmented already, or by `codes`: a file of merges
    learned elsewhere. train_fraction: the part of the training pairs that is used, a sample by
    train_fraction_seed; a smaller one is part of a larger. flags: passed on to fairseq-preprocess.
    """

    recipe: str
    source: Optional[str] = None
    target: Optional[str] = None
    bpe: Optional[int] = None
    codes: Optional[str] = None
    joined_dictionary: bool = True
    lowercase: bool = False
    train_fraction: Optional[float] = None
    train_fraction_seed: int = 1
    flags: Dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Model:
    """The arch and, for mixtures of attention heads, E, K and D. flags: passed on to fairseq-train."""

    arch: str
    num_experts: Optional[int] = None
    experts_per_token: Optional[int] = None
    expert_dim: Optional[int] = None
    share_all_embeddings: bool = False
    flags: Dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_flags(self) -> Dict[str, Any]:
        """All of it as flags of fairseq-train."""
        own = {name.replace("_", "-"): value for name, value in vars(self).items() if name != "flags"}
        return {**own, **self.flags}


@dataclasses.dataclass
class Train:
    """Optimisation.

    effective_batch_tokens: tokens of one update, over all devices and accumulation steps, padding
    included (fairseq's --max-tokens counts so). max_tokens: at most so many at once on one device;
    min_tokens: at least so many, by default as many as the longest sentence or sample has.
    flags: passed on to fairseq-train (optimizer, lr, regularisation, ...).
    """

    max_tokens: int
    criterion: str
    task: str = "translation"
    effective_batch_tokens: Optional[int] = None
    min_tokens: Optional[int] = None
    max_epoch: Optional[int] = None
    max_update: Optional[int] = None
    seed: int = 1
    precision: str = "auto"
    keep_last_epochs: int = 10
    log_interval: int = 100
    flags: Dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Average:
    """How many of the last checkpoints are averaged: of epochs, or of train.flags.save-interval-updates."""

    epochs: Optional[int] = None
    updates: Optional[int] = None

    @property
    def count(self) -> int:
        """Number of checkpoints in the average."""
        return self.epochs or self.updates or 0


@dataclasses.dataclass
class Generate:
    """Beam search. subsets: the first one is the recipe's result. flags: passed on to fairseq-generate."""

    subsets: List[str]
    beam: int
    lenpen: float = 1.0
    max_tokens: int = 4096
    remove_bpe: bool = True
    flags: Dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Score:
    """headline: the metric that is compared with the paper. flags: passed on to moa-fairseq score, or for a
    causal language model to fairseq-eval-lm.

    subsets: what a language model or a classifier is scored on, the first one being the recipe's result;
    translations are scored on generate.subsets.
    """

    headline: str = "multi_bleu"
    subsets: List[str] = dataclasses.field(default_factory=list)
    flags: Dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Recipe:
    """One experiment, from data to score. A section that is None is a stage left out.

    finetune: how (one of FINETUNING) the model of `pretrained`, a run folder or a checkpoint, is fine-tuned.
    """

    experiment: str
    summary: str
    data: Data
    model: Model
    train: Train
    reproduces: Optional[Reproduces] = None
    pretrained: Optional[str] = None
    finetune: Optional[str] = None
    average: Optional[Average] = None
    generate: Optional[Generate] = None
    score: Optional[Score] = None

    @property
    def kind(self) -> str:
        """MASKED_LM, CAUSAL_LM, CLASSIFICATION or TRANSLATION: it decides which stages there are."""
        task = self.train.task
        return next((kind for beginning, kind in KINDS.items() if task.startswith(beginning)), TRANSLATION)

    @property
    def training_flags(self) -> Dict[str, Any]:
        """The flags of fairseq-train in `model.flags` and `train.flags`."""
        return {**self.model.flags, **self.train.flags}

    @property
    def execution_flags(self) -> Sequence[str]:
        """The flags of fairseq-train that leave this experiment the same."""
        averages_updates = self.average and self.average.updates
        return EXECUTION_FLAGS if averages_updates else (*EXECUTION_FLAGS, *INTERVAL_FLAGS)

    @property
    def training_inputs(self) -> Dict[str, Any]:
        """What must not change between two starts of one training, its data aside."""
        sections = {"model": dataclasses.asdict(self.model), "train": dataclasses.asdict(self.train)}
        for key in (*EXECUTION_KEYS, "max_epoch", "max_update"):
            del sections["train"][key]
        for section in sections.values():
            said = section["flags"].items()
            section["flags"] = {key: value for key, value in said if key not in self.execution_flags}
        return sections

    @property
    def goal(self) -> Dict[str, Optional[int]]:
        """How far the training goes."""
        return {"max_epoch": self.train.max_epoch, "max_update": self.train.max_update}

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
