"""fairseq's trainer in this process, on the toy corpus; shares `trainer_updates` with the tests here."""

import sys
from pathlib import Path

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

import moa_fairseq

assert moa_fairseq.__version__
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def build_trainer(toy_data):
    """build_trainer(*flags) → (trainer, micro-batches of the first epoch).

    common: settings of fairseq's common section that its parser does not let through on a CPU.
    """

    def build(
        *flags, data=toy_data, arch="mae_transformer_tiny", task="translation_bcd", model=None, common=()
    ):
        torch.manual_seed(3)
        model = ("--encoder-layers", 1, "--share-all-embeddings") if model is None else model
        base = [str(data), "--arch", arch, "--task", task, "--cpu", "--decoder-layers", 1]
        base += ["--optimizer", "adam", "--lr", 0.01, "--dropout", 0, "--seed", 7, "--max-tokens", 100]
        base += ["--num-workers", 0]
        words = [str(word) for word in (*base, *model, *flags)]
        args = options.parse_args_and_arch(options.get_training_parser(), words)
        cfg = convert_namespace_to_omegaconf(args)
        cfg.common.update(common)
        task = tasks.setup_task(cfg.task)
        trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
        batches = trainer.get_train_iterator(1).next_epoch_itr(shuffle=False)
        return trainer, list(batches)

    return build
