"""`--task language_modeling_bcd`: causal language modelling with MAE's block coordinate descent."""

from dataclasses import dataclass

from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from moa_fairseq.coordinate_descent.task import BlockCoordinateDescent, BlockCoordinateDescentConfig


@dataclass
class LanguageModelingBCDConfig(BlockCoordinateDescentConfig, LanguageModelingConfig):
    """fairseq's language modelling flags and those of block coordinate descent."""


@register_task("language_modeling_bcd", dataclass=LanguageModelingBCDConfig)
class LanguageModelingBCDTask(BlockCoordinateDescent, LanguageModelingTask):
    """fairseq's language modelling whose updates alternate between gates and experts (MAE Algorithms 1-3)."""
