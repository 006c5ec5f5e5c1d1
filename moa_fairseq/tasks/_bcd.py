"""MAE's block coordinate descent: gates in G steps, everything else in F steps (MAE §3, Algorithms 1-3).

How it sits in fairseq:

* An F step is fairseq's own update. The gates do not require gradients in it, so they are in no
  optimizer of fairseq's, in no gradient all-reduce, under no schedule, weight decay or clipping, and a
  restart finds the same optimizer again. The task opens `drawing_experts` around forward and backward
  pass, and every attention computes with one drawn expert per sequence.
* A G step comes before it. fairseq hands a task one micro-batch at a time, which is too late: the F step
  of the first micro-batch draws from gates that have been updated with the last one. So the plugin has
  the trainer announce each update with all of its micro-batches (`before_update`), and the G step is
  carried out there: forward passes with mixed experts, gradients with respect to the gates alone
  (`torch.autograd.grad`: no expert's .grad is touched, Adam never hears of it), summed over
  micro-batches and workers, divided by the sample size, one plain SGD step.
* Nothing has to be remembered but the parameters: SGD has no state, epochs are fairseq's, and a draw is
  a function of seed, update number, sentence and module.

Fine-tuning (MAE §5.2) freezes parameters and is else the same. FTG updates gates only: no F step is
left, and its G steps are ordinary updates of mixed experts by fairseq's own optimizer, `--optimizer sgd`.
"""

import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics
from torch import nn

from moa_fairseq.attention.expert_draw import ExpertDraw, drawing_experts
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.sequence_gate import forgetting_statistics, gates_of
from moa_fairseq.errors import UserError
from moa_fairseq.tasks._finetuning import METHODS, freeze_rest, report_updated
from moa_fairseq.tasks._g_step import GStep
from moa_fairseq.tasks._gate_log import GateEntropyLog

logger = logging.getLogger(__name__)


@dataclass
class BlockCoordinateDescentConfig:
    """Flags of every task with block coordinate descent; mixed into the config of a fairseq task."""

    bcd: ChoiceEnum(["alternate", "none"]) = field(
        default="alternate",
        metadata={
            "help": "update gates and experts in turn, experts being drawn (alternate: MAE Algorithm 3), "
            "or all together, experts being mixed (none: the paper's NOBCD)"
        },
    )
    bcd_g_every: int = field(
        default=5, metadata={"help": "take G steps in every Nth epoch; F steps are always taken"}
    )
    gate_lr: float = field(default=1.0, metadata={"help": "fixed learning rate of the gates' SGD"})
    gate_clip_norm: float = field(
        default=0.0, metadata={"help": "clip the gradient norm of all gates in G steps; 0 does not"}
    )
    finetune: ChoiceEnum(METHODS) = field(
        default="all",
        metadata={
            "help": "what is updated: all or ftall: everything; ftg_plus: gates and output projections; ftg: "
            "gates only, in ordinary updates (use --optimizer sgd --lr 1 --lr-scheduler fixed). The others "
            "keep the values that --finetune-from-model gives them"
        },
    )


class BlockCoordinateDescent:
    """The two kinds of steps. Precedes the fairseq task it extends.

    Every model of `mae_*` architectures can be trained. One with uniform gates (UNI-MAE) has no G steps.
    """

    _epoch = 0
    _g_step: Optional[GStep] = None

    @property
    def alternates(self) -> bool:
        """Whether gates and experts are updated in turn."""
        return str(self.cfg_of_bcd.bcd) == "alternate" and self.finetune != "ftg"

    @property
    def finetune(self) -> str:
        """One of METHODS; older checkpoints know of none."""
        return str(getattr(self.cfg_of_bcd, "finetune", None) or "all")

    @property
    def cfg_of_bcd(self) -> Any:
        """The task's configuration, which fairseq's older tasks call `args`."""
        return self.cfg if getattr(self, "cfg", None) is not None else self.args

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> nn.Module:
        """Build the model and freeze its gates: from here on only G steps touch them.

        Raises UserError for a model without mixtures of attentive experts, or impossible flags.
        """
        own = self.cfg_of_bcd
        if own.bcd_g_every < 1:
            raise UserError(
                f"--bcd-g-every {own.bcd_g_every}: G steps are taken every so many epochs, 1 or more."
            )
        model = super().build_model(cfg, from_checkpoint)
        if not any(isinstance(module, MixtureOfAttentiveExperts) for module in model.modules()):
            raise UserError(
                f"{type(self).__name__} trains mixtures of attentive experts: choose an --arch whose name "
                f"begins with mae_, or fairseq's own task."
            )
        freeze_rest(model, self.finetune)
        if self.alternates:
            for gate in gates_of(model):
                gate.requires_grad_(False)
        return model

    def takes_g_steps(self, epoch: int) -> bool:
        """Whether a G step precedes every F step of an epoch (Algorithm 3; epochs count from 1)."""
        return self.alternates and epoch % self.cfg_of_bcd.bcd_g_every == 0

    def begin_epoch(self, epoch: int, model: nn.Module) -> None:
        """fairseq's hook; says in the log which steps the epoch takes."""
        super().begin_epoch(epoch, model)
        if not self._epoch:
            report_updated(model, self.finetune)
        self._epoch = epoch
        parameters = sum(p.numel() for gate in gates_of(model) for p in gate.parameters())
        if self.finetune == "ftg":
            steps = "G steps by fairseq's optimizer (FTG)"
        elif not self.alternates:
            steps = "joint updates of gates and experts (NOBCD)"
        elif not parameters:
            steps = "F steps (uniform gates)"
        else:
            steps = "G and F steps" if self.takes_g_steps(epoch) else "F steps"
        logger.info(f"epoch {epoch}: {steps}; {parameters:,} parameters in gates")

    def before_update(self, trainer: Any, samples: List[Dict[str, Any]]) -> None:
        """The plugin's hook: all micro-batches that the trainer is about to make one update of."""
        gates = gates_of(trainer.get_model())
        for gate in gates:
            gate.norm.forget()  # what an update saw that overflowed and was not made
        if not self.alternates or not gates:
            return
        if self._g_step is None:
            self._g_step = GStep(trainer, self.cfg_of_bcd.gate_lr, self.cfg_of_bcd.gate_clip_norm)
        takes_g = self.takes_g_steps(self._epoch)
        with metrics.aggregate("train"):
            metrics.log_scalar("g_step", int(takes_g), round=3)
            metrics.log_derived("bcd_step", lambda meters: "GF" if meters["g_step"].val else "F")
            if takes_g:
                metrics.log_start_time("train_wall", priority=800, round=0)
                self._g_step(samples)
                metrics.log_stop_time("train_wall")

    def train_step(
        self,
        sample: Dict[str, Any],
        model: nn.Module,
        criterion: Callable,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
        **kwargs: Any,
    ):
        """fairseq's forward and backward pass of one micro-batch, as an F step if steps alternate."""
        rest = (model, GateEntropyLog(criterion), optimizer, update_num, ignore_grad)
        with contextlib.ExitStack() as stack:
            if ignore_grad:  # a batch that only fills a gap among the workers is no observation
                stack.enter_context(forgetting_statistics(gates_of(model)))
            if self.alternates:
                draw = ExpertDraw(sample["id"], self.cfg_of_bcd.seed, update_num)
                stack.enter_context(drawing_experts(draw))
            return super().train_step(sample, *rest, **kwargs)

    def valid_step(self, sample: Dict[str, Any], model: nn.Module, criterion: Callable, **kwargs: Any):
        """fairseq's, with the gates' entropies: experts are mixed, as in a G step."""
        return super().valid_step(sample, model, GateEntropyLog(criterion), **kwargs)

    def reduce_metrics(self, logging_outputs: List[Dict[str, Any]], criterion: Any) -> None:
        """Log fairseq's metrics and the gates' entropies."""
        super().reduce_metrics(logging_outputs, criterion)
        GateEntropyLog.reduce_metrics(logging_outputs)
