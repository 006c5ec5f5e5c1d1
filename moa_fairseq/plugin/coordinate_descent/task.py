"""MAE's block coordinate descent: gates in G steps, everything else in F steps (MAE §3, Algorithms 1-3).

* An F step is fairseq's own update with a draw of experts. The gates do not require gradients in it, so
  fairseq's optimizer, all-reduce, schedule and clipping do not touch them, and a restart finds the same
  optimizer again.
* A G step comes before the F step (`GStep`). fairseq passes a task one micro-batch at a time, but the first
  one must draw experts by gates that all micro-batches have updated. So the plugin lets the trainer announce
  each update (`before_update`).
* Only the parameters and the gates' running statistics have to be saved: SGD has no state, epochs are
  fairseq's, and a draw is a function of seed, update number, sentence, module and gate.

In joint training (NOBCD) the gates take their step together with fairseq's (`JointStep`). FTG (§5.2) has no F
steps: its G steps are ordinary updates by fairseq's optimizer.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics
from torch import nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.expert_draw import ExpertDraw
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.sequence_gate import gate_parameters, gates_of
from moa_fairseq.layers.settings import flag
from moa_fairseq.plugin.coordinate_descent.finetuning import METHODS, freeze_rest, updated_by
from moa_fairseq.plugin.coordinate_descent.gate_log import GateEntropyLog
from moa_fairseq.plugin.coordinate_descent.gate_steps import GStep, JointStep
from moa_fairseq.plugin.forward_context import forward_context

logger = logging.getLogger(__name__)

if TYPE_CHECKING:  # fairseq makes enums of a flag's choices, and its classes have no types
    from fairseq.tasks import FairseqTask

    Steps = str
    GateOptimizer = str
    Method = str
else:
    FairseqTask = object
    Steps = ChoiceEnum(["alternate", "none"])
    GateOptimizer = ChoiceEnum(["sgd", "fairseq"])
    Method = ChoiceEnum(METHODS)


@dataclass
class BlockCoordinateDescentConfig:
    """Flags of every task with block coordinate descent; mixed into the config of a fairseq task."""

    bcd: Steps = flag(
        "alternate",
        "block coordinate descent. alternate: updates of gates and experts in turn, with one sampled expert "
        "(MAE Algorithm 3); none: joint updates, with mixed experts (the paper's NOBCD)",
    )
    bcd_g_every: int = flag(5, "interval of G steps, in epochs; every epoch has F steps")
    gate_optimizer: GateOptimizer = flag(
        "sgd",
        "optimizer of the gates in joint training (--bcd none). sgd: plain SGD with --gate-lr, without "
        "momentum, weight decay or schedule, as in the paper's NOBCD; fairseq: --optimizer, like the rest of "
        "the model. G steps always use plain SGD",
    )
    gate_lr: float = flag(1.0, "fixed learning rate of the gates' SGD")
    gate_clip_norm: float = flag(
        0.0,
        "maximum gradient norm of all gates in their SGD; 0: no clipping (--clip-norm is for the parameters "
        "of --optimizer)",
    )
    finetune: Method = flag(
        "all",
        "trained parameters. all, ftall: all; ftg_plus: gates and output projections; ftg: gates only, "
        "in ordinary updates (use --optimizer sgd --lr 1 --lr-scheduler fixed). Other parameters keep "
        "their values from --finetune-from-model",
    )


class BlockCoordinateDescent(FairseqTask):
    """G steps and F steps. The class precedes the fairseq task that it extends.

    It trains every `mae_*` architecture. Models with uniform gates (UNI-MAE) have no G steps.
    """

    _epoch = 0
    _g_step: GStep | None = None
    _joint_step: JointStep | None = None

    @property
    def alternates(self) -> bool:
        """Whether gates and experts are updated in turn."""
        return str(self.settings.bcd) == "alternate" and self.finetune != "ftg"

    @property
    def steps_jointly(self) -> bool:
        """Whether the gates take a step of plain SGD together with fairseq's update."""
        gate_optimizer = str(getattr(self.settings, "gate_optimizer", None) or "sgd")
        return gate_optimizer == "sgd" and not self.alternates and self.finetune != "ftg"

    @property
    def optimizer_remedy(self) -> str:
        """The flag to resume with, for the message about an optimizer that had other parameters."""
        if str(self.settings.bcd) != "none":
            return ""
        if self.steps_jointly:
            return " (--gate-optimizer fairseq if its optimizer had the gates, as before the flag existed)"
        return " (--gate-optimizer sgd if the gates had steps of their own)"

    @property
    def finetune(self) -> str:
        """One of METHODS; older checkpoints have no such setting."""
        return str(getattr(self.settings, "finetune", None) or "all")

    @property
    def settings(self) -> Any:
        """The task's configuration, which fairseq's older tasks call `args`."""
        cfg = getattr(self, "cfg", None)
        return self.args if cfg is None else cfg

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> nn.Module:
        """Build the model and freeze its gates, so that fairseq's optimizer does not get them.

        Raises:
            UserError: if the model has no mixtures of attentive experts, or flags are impossible.
        """
        if self.settings.bcd_g_every < 1:
            raise UserError(
                f"--bcd-g-every {self.settings.bcd_g_every} must be at least 1: it is an interval in epochs."
            )
        for name in ("gate_lr", "gate_clip_norm"):
            value = getattr(self.settings, name)
            if not 0 <= value < math.inf:
                raise UserError(
                    f"--{name.replace('_', '-')} is {value}: give a finite number, 0 or more."
                )
        model = super().build_model(cfg, from_checkpoint)
        if not any(isinstance(module, MixtureOfAttentiveExperts) for module in model.modules()):
            raise UserError(
                f"{type(self).__name__} trains mixtures of attentive experts: choose an --arch whose name "
                f"begins with mae_, or fairseq's own task."
            )
        freeze_rest(model, self.finetune)
        if self.alternates or self.steps_jointly:
            for gate in gates_of(model):
                gate.requires_grad_(False)
        return model

    def takes_g_steps(self, epoch: int) -> bool:
        """Whether a G step precedes every F step of an epoch (Algorithm 3; epochs count from 1)."""
        return self.alternates and epoch % self.settings.bcd_g_every == 0

    def begin_epoch(self, epoch: int, model: nn.Module) -> None:
        """fairseq's hook, which here also logs the kinds of steps of the epoch."""
        super().begin_epoch(epoch, model)
        if not self._epoch:
            total = _count(model.parameters())
            updated = _count(updated_by(model, self.finetune))
            logger.info(f"{updated:,} of {total:,} parameters are updated")
        self._epoch = epoch
        in_gates = _count(gate_parameters(model))
        steps = self._steps_of(epoch, bool(in_gates))
        logger.info(f"epoch {epoch}: {steps}; {in_gates:,} parameters in gates")

    def _steps_of(self, epoch: int, has_gates: bool) -> str:
        if self.finetune == "ftg":
            return "G steps by fairseq's optimizer (FTG)"
        if not self.alternates:
            by = "plain SGD" if self.steps_jointly else "fairseq's optimizer"
            return f"joint updates of gates and experts (NOBCD), gates by {by}"
        if not has_gates:
            return "F steps (uniform gates)"
        return "G and F steps" if self.takes_g_steps(epoch) else "F steps"

    def before_update(self, trainer: Any, samples: list[dict[str, Any]]) -> None:
        """The plugin's hook before an update: in epochs with G steps the gates take theirs here.

        Args:
            trainer: fairseq's trainer.
            samples: all micro-batches of the update that follows.

        Raises:
            UserError: if the gates have diverged.
        """
        model = trainer.get_model()
        if not gates_of(model):
            return
        sgd = (self.settings.gate_lr, self.settings.gate_clip_norm)
        if self.steps_jointly:
            self._joint_step = self._joint_step or JointStep(model, *sgd)
            self._joint_step.reset()
        elif self.alternates:
            if self._g_step is None:
                self._g_step = GStep(trainer, *sgd)
                warn_of_no_g_step(trainer, self.settings.bcd_g_every)
            self._alternate(self._g_step, samples)

    def _alternate(self, g_step: GStep, samples: list[dict[str, Any]]) -> None:
        """Take a G step in an epoch with G steps, and log which steps this update takes."""
        takes_g = self.takes_g_steps(self._epoch)
        with metrics.aggregate("train"):
            metrics.log_scalar("g_step", int(takes_g), round=3)
            metrics.log_derived("bcd_step", lambda meters: "GF" if meters["g_step"].val else "F")
            if takes_g:
                metrics.log_start_time("train_wall", priority=800, round=0)
                g_step(samples)
                metrics.log_stop_time("train_wall")

    def train_step(
        self,
        sample: dict[str, Any],
        model: nn.Module,
        criterion: Callable,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
        **kwargs: Any,
    ):
        """fairseq's forward and backward pass of one micro-batch, as an F step if steps alternate."""
        arguments = (model, GateEntropyLog(criterion), optimizer, update_num, ignore_grad)
        with contextlib.ExitStack() as stack:
            if self.alternates:
                draw = ExpertDraw(sample["id"], self.settings.seed, update_num)
                stack.enter_context(forward_context(draw=draw))
            if self._joint_step is not None:
                stack.enter_context(self._joint_step.in_backward())
            loss, sample_size, logging_output = super().train_step(sample, *arguments, **kwargs)
        if self._joint_step is not None and not ignore_grad:
            self._joint_step.sample_size += float(sample_size)
        return loss, sample_size, logging_output

    def optimizer_step(self, optimizer: Any, model: nn.Module, update_num: int) -> None:
        """fairseq's step and, in joint training, the gates' own step.

        Raises:
            UserError: if the gates have diverged in joint training.
        """
        step = self._joint_step
        with contextlib.nullcontext() if step is None else step.around_step(optimizer):
            super().optimizer_step(optimizer, model=model, update_num=update_num)

    def valid_step(
        self, sample: dict[str, Any], model: nn.Module, criterion: Callable, **kwargs: Any
    ):
        """fairseq's step with mixed experts, as in a G step; it also logs the entropies of the gates."""
        return super().valid_step(sample, model, GateEntropyLog(criterion), **kwargs)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Log fairseq's metrics and the gates' entropies."""
        super().reduce_metrics(logging_outputs, criterion)
        GateEntropyLog.reduce_metrics(logging_outputs)


def warn_of_no_g_step(trainer: Any, every: int) -> None:
    """Log a warning if --max-epoch or --max-update ends the run before epoch `every`.

    Args:
        trainer: fairseq's trainer; if its task keeps no iterator of the training, --max-update is ignored.
        every: the first epoch with G steps.
    """
    limits = trainer.cfg.optimization
    ends = []
    if limits.max_epoch:
        ends.append((limits.max_epoch, f"--max-epoch {limits.max_epoch}"))
    task = trainer.task
    iterator = task.dataset_to_epoch_iter.get(task.dataset(trainer.cfg.dataset.train_subset))
    if limits.max_update and iterator is not None:
        updates = math.ceil(len(iterator) / limits.update_freq[-1])
        ends.append((math.ceil(limits.max_update / updates), f"--max-update {limits.max_update}"))
    last_epoch, limit = min(ends, default=(every, ""))
    if last_epoch < every:
        logger.warning(
            f"this run takes no G step: {limit} ends in epoch {last_epoch}, and --bcd-g-every {every} takes "
            f"the first ones in epoch {every}. Its gates stay as they were initialised, and experts are "
            "drawn almost uniformly: train longer, or lower --bcd-g-every."
        )


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(map(torch.numel, parameters))
