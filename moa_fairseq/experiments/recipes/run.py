"""A recipe with the devices, the folder and the options of its run."""

import argparse
import dataclasses
from pathlib import Path

import moa_fairseq
from moa_fairseq.experiments.data.binarised import Prepared
from moa_fairseq.experiments.make import Step
from moa_fairseq.experiments.recipes.checkpoints import pretrained_checkpoint
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.experiments.records.json_files import Values
from moa_fairseq.process import flags, positional

NOT_PREPARED = Prepared(folder=Path(), sentences={}, fingerprint="")


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line's settings outside the recipe.

    Args:
        stage: the requested stage, or "all".
        data: the user's folder of raw or binarised text.
        save_dir: the run folder, if it is not runs/<experiment>.
        restart: whether the run folder is moved aside first.
        record: a further file for the result, or with --stage train for the speed of the training.
        command_line: the command line of this program, for result.json.
        prepare_command: the command line that makes only the data.
        user_dir: the user's own plugin, which imports this package.
        data_root: the folder of data sets.
        published_recipe: the recipe without any --set, which may reproduce a row of a paper.
        training_flags: the flags of the training as fairseq parsed them, for checks before it starts.
    """

    stage: str = "all"
    data: Path | None = None
    save_dir: Path | None = None
    restart: bool = False
    record: Path | None = None
    command_line: str = ""
    prepare_command: str = ""
    user_dir: Path | None = None
    data_root: Path = Path("data")
    published_recipe: Recipe | None = None
    training_flags: argparse.Namespace | None = None

    def includes_stage(self, stage: str) -> bool:
        """True if --stage includes this stage."""
        return self.stage in (stage, "all")


@dataclasses.dataclass(frozen=True)
class Run:
    """One recipe in one run folder.

    Args:
        recipe: the experiment.
        hardware: the devices that can share its updates.
        folder: the run folder.
        options: the command line's other settings.
        prepared: the binarised data.
    """

    recipe: Recipe
    hardware: Hardware
    folder: Path
    options: Options
    prepared: Prepared = NOT_PREPARED

    @property
    def checkpoints(self) -> Path:
        """fairseq's --save-dir."""
        return self.folder / "checkpoints"

    @property
    def model_path(self) -> Path:
        """The checkpoint to evaluate."""
        if self.recipe.pretrained and self.recipe.finetune == "noft":
            return pretrained_checkpoint(self.recipe.pretrained)
        if self.recipe.average:
            return self.folder / "average.pt"
        return self.checkpoints / "checkpoint_best.pt"

    def includes_step(self, step: Step) -> bool:
        """True if --stage includes the step's stage: generate-test is of generate, zero_shot of zero-shot."""
        stage = step.name.partition("-")[0].replace("_", "-")
        return self.options.includes_stage(stage)

    @property
    def conditions(self) -> Values:
        """What the provenance of every step has in addition to commit and versions."""
        return {"hardware": self.hardware.describe(), "command": self.options.command_line}

    def command(self, program: str, values: Values) -> list[str]:
        """The command of a fairseq program on the data, with the plugin, the task and the given flags.

        Args:
            program: the name of the program, such as "fairseq-train".
            values: flag → value: None and False leave a flag out, True gives it without a value.

        Raises:
            UserError: for a value that looks like a flag.
        """
        plugin = self.options.user_dir or Path(moa_fairseq.__file__).parent
        task_flags = self.recipe.task_flags
        line = {"user-dir": str(plugin)} | task_flags | values | {"cpu": not self.hardware.gpus}
        return [program, positional(self.prepared.folder), *flags(line)]
