"""`--task translation_bcd`, `language_modeling_bcd`: fairseq's tasks with MAE's block coordinate descent."""

from dataclasses import dataclass

from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import II

from moa_fairseq.plugin.coordinate_descent.task import (
    BlockCoordinateDescent,
    BlockCoordinateDescentConfig,
)


@dataclass
class TranslationBCDConfig(BlockCoordinateDescentConfig, TranslationConfig):
    """fairseq's translation flags and those of block coordinate descent."""

    seed: int = II("common.seed")


@register_task("translation_bcd", dataclass=TranslationBCDConfig)
class TranslationBCDTask(BlockCoordinateDescent, TranslationTask):
    """fairseq's translation task whose updates alternate between gates and experts (MAE Algorithms 1-3)."""


@dataclass
class LanguageModelingBCDConfig(BlockCoordinateDescentConfig, LanguageModelingConfig):
    """fairseq's language modelling flags and those of block coordinate descent."""


@register_task("language_modeling_bcd", dataclass=LanguageModelingBCDConfig)
class LanguageModelingBCDTask(BlockCoordinateDescent, LanguageModelingTask):
    """fairseq's language modelling task with the same alternating updates."""
