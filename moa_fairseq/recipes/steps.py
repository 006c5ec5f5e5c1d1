"""A run and its steps: one command each, what it is made from, what it makes, and how it is carried out."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import moa_fairseq
from moa_fairseq.data_prep.binarised import Prepared
from moa_fairseq.data_prep.stage_folder import fingerprint_of
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write
from moa_fairseq.recipes.finetune import pretrained_checkpoint
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.run_folder import RunState, is_whole
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.running import command_line
from moa_fairseq.running.process import Executor

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Step:
    """One command of a run; what is printed before it starts is what is executed.

    name: its entry in state.json and the name of its log. stage: the --stage that it belongs to.
    """

    name: str
    stage: str
    command: List[str]


@dataclasses.dataclass(frozen=True)
class OutputStep(Step):
    """A step that makes one file, once from the same inputs.

    output: a file that appears when it is whole. inputs: finds what it depends on (stamps of files,
    settings); raises UserError where a file is missing. captured: receives what the command prints
    (errors_too: on standard error, too), line by line told to `watch`. scores: reads them from what was
    captured, and the output keeps them as JSON; raises UserError where there are none. finish: makes any
    other output. remember: what state.json keeps beside the fingerprint of the inputs.
    """

    output: Path
    inputs: Callable[[], List[Any]]
    captured: Optional[Path] = None
    errors_too: bool = False
    watch: Optional[Callable[[str], None]] = None
    scores: Optional[Callable[[Path], Dict[str, Any]]] = None
    finish: Callable[[], None] = lambda: None
    remember: Callable[[], Dict[str, Any]] = dict


@dataclasses.dataclass
class Run:
    """One recipe on one binarised folder, in one run folder: all that its steps are made of.

    prepared: the binarised folder, and what is known of it. folder: the run folder. root: where the data is
    prepared; None where it is used as fairseq-preprocess left it. corpus: where the embedded corpus is built
    first. trained: the checkpoint to evaluate where another run made it. user_dir: a plugin of the user's
    own, which imports this one.
    """

    recipe: Recipe
    hardware: Hardware
    prepared: Prepared
    folder: Path
    root: Optional[Path] = None
    corpus: Optional[Path] = None
    trained: Optional[Path] = None
    user_dir: Optional[Path] = None
    executor: Executor = dataclasses.field(default_factory=Executor)
    state: RunState = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.state = RunState(self.folder)

    @property
    def data(self) -> Path:
        """The binarised folder."""
        return self.prepared.folder

    @property
    def checkpoints(self) -> Path:
        """fairseq's --save-dir."""
        return self.folder / "checkpoints"

    @property
    def model(self) -> Path:
        """The checkpoint that is evaluated."""
        if self.trained:
            return self.trained
        if self.recipe.pretrained and self.recipe.finetune == "noft":
            return pretrained_checkpoint(self.recipe.pretrained)
        return self.folder / "average.pt" if self.recipe.average else self.checkpoints / "checkpoint_best.pt"

    def task_flags(self) -> Dict[str, Any]:
        """The plugin, the task and its languages, as every fairseq command of the run gets them."""
        task, data = self.recipe.train.task, self.recipe.data
        pair = (
            {"source-lang": data.source, "target-lang": data.target} if task.startswith("translation") else {}
        )
        plugin = self.user_dir or Path(moa_fairseq.__file__).parent
        return {"user-dir": str(plugin), "task": task, **pair}

    def device_flags(self) -> List[str]:
        """--cpu for a run without GPUs."""
        return [] if self.hardware.gpus else ["--cpu"]

    def log(self, name: str) -> Path:
        """Where a step's full output goes."""
        return self.folder / f"{name}.log"

    def show(self, command: List[str]) -> None:
        """Print a command before it runs, and keep it in commands.sh (once: a resumed run repeats it)."""
        line = command_line.to_shell(command, self.executor.environment)
        log.info("$ %s", line)
        path = self.folder / "commands.sh"
        kept = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        kept = kept or ["#!/usr/bin/env bash", "# What this run executed, in order.", "set -euo pipefail"]
        if self.hardware.leads and line not in kept:
            with atomic_write(path) as stream:
                stream.write("\n".join([*kept, line]) + "\n")

    def evaluation(
        self, stage: str, command: List[str], output: Path, section: Any, *further: Any, **more: Any
    ) -> OutputStep:
        """A step that evaluates the checkpoint by a section of the recipe.

        It depends on the checkpoint, the section, `further` values and the data; it remembers how it was
        evaluated, which training the model is of, and how many checkpoints are averaged in it. more: other
        fields of the step.
        """

        def inputs() -> List[Any]:
            if not is_whole(self.model):
                missing = "average" if self.recipe.average else "train"
                raise UserError(
                    f"{self.model} is missing or cut off: run --stage {missing} first (or --stage all)."
                )
            return [stamp(self.model), dataclasses.asdict(section), *further, self.prepared.fingerprint]

        def remember() -> Dict[str, Any]:
            origin = self.state.get("average" if self.recipe.average else "train")
            return {
                "settings": dataclasses.asdict(section),
                "checkpoints": origin.get("checkpoints", 1),
                "training": origin.get("training", origin.get("done")),
            }

        return OutputStep(output.stem, stage, command, output, inputs, remember=remember, **more)


def carry_out(run: Run, step: OutputStep) -> None:
    """Run a step's command unless it was done before from the same inputs. Raises UserError if it fails."""
    done = fingerprint_of(*step.inputs())
    if run.state.is_done(step.name, done, step.output):
        log.info("%s: done before (%s)", step.name, step.output)
    else:
        run.show(step.command)
        run.executor.run(
            step.command, run.log(step.name), step.captured, on_line=step.watch, errors_too=step.errors_too
        )
        if step.scores and step.captured:
            scores = step.scores(step.captured)
            with atomic_write(step.output) as stream:
                json.dump(scores, stream, indent=1)
            if step.captured.suffix == ".partial":
                step.captured.unlink()
        step.finish()
    # Also of one made before: training may have gone on since without a newer checkpoint.
    run.state.put(step.name, done=done, **step.remember())


def stamp(path: Path) -> List[Any]:
    """Name, size and time of a file: enough to tell that it was made again."""
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]
