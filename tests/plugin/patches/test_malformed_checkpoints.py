"""Malformed checkpoints on every way to load one: it ends well, or in one paragraph that names the file.

Commands are called below their parsers, so that some thousand loads take a minute; what the parsers add is
in test_planted_checkpoints.py.
"""

import copy
import functools
import resource

import pytest
import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from plugin.patches import malformed

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches.checkpoint_content import check_checkpoint
from moa_fairseq.plugin.patches.malformed_checkpoints import _check_limits, _check_progress
from moa_fairseq.plugin.patches.user_errors import print_user_errors

ROOM = 3 << 30  # bytes of address space beside what the process has


@pytest.fixture(scope="module")
def sound(toy_checkpoint):
    """The state that is changed, without settings that no way of loading reads."""
    state = torch.load(toy_checkpoint, weights_only=False)
    for group in state["cfg"].keys() - {"model", "task", "criterion"}:
        state["cfg"][group] = {}
    return state


@pytest.fixture(autouse=True)
def little_memory():
    """What is not refused raises a MemoryError instead of filling the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as pages:
        now = int(pages.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def generate(path, data, settings):
    """With the command's own task, as fairseq-generate and fairseq-interactive."""
    task = tasks.setup_task(OmegaConf.create({**settings["task"], "data": str(data)}))
    models, saved = checkpoint_utils.load_model_ensemble([str(path)], task=task)
    task.load_dataset("test", task_cfg=saved.task)
    translate(task, models)


def validate(path, data, settings):
    """With the checkpoint's own task, data and criterion, as fairseq-validate and this package's verbs."""
    models, saved, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    criterion = task.build_criterion(saved.criterion)
    task.load_dataset("test", task_cfg=saved.task)
    for sample in batches(task, models):
        task.valid_step(sample, models[0].eval(), criterion.eval())


def batches(task, models):
    limits = utils.resolve_max_positions(
        task.max_positions(), *(model.max_positions() for model in models)
    )
    dataset = task.dataset("test")
    return task.get_batch_iterator(
        dataset, max_tokens=400, max_positions=limits
    ).next_epoch_itr(shuffle=False)


def translate(task, models):
    generator = task.build_generator(models, OmegaConf.create({"beam": 2, "max_len_b": 5}))
    for sample in batches(task, models):
        task.inference_step(generator, models, sample)
        break


@pytest.fixture(scope="module")
def resume(toy_data, toy_checkpoint):
    """resume(path, …): goes on with the training of `toy_checkpoint` for one update, as fairseq-train."""
    words = [str(toy_data), "--arch", "moa_transformer_tiny", "--share-all-embeddings", "--cpu"]
    words += [
        "--encoder-layers",
        "1",
        "--decoder-layers",
        "1",
        "--optimizer",
        "adam",
        "--lr",
        "0.003",
    ]
    words += [
        "--criterion",
        "label_smoothed_cross_entropy_with_routing",
        "--label-smoothing",
        "0.1",
    ]
    words += ["--max-tokens", "400", "--num-workers", "0"]
    parser = options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))
    task = tasks.setup_task(cfg.task)

    def load(path, data, settings):
        trainer = Trainer(
            cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion)
        )
        cfg.checkpoint.restore_file = str(path)
        _, iterator = checkpoint_utils.load_checkpoint(cfg.checkpoint, trainer)
        samples = iterator.next_epoch_itr(shuffle=False)
        trainer.train_step([next(samples)])
        checkpoint_utils.save_checkpoint.best = None

    return load


def verb(*words):
    def load(capsys, path, data, settings):
        places = {"PATH": path, "DATA": data, "OUT": path.with_name("out.pt")}
        status = main([str(places.get(word, word)) for word in words])
        if status:
            errors = capsys.readouterr().err
            raise UserError(errors[errors.index(f"moa-fairseq {words[0]}: error: ") :].strip())

    return load


VERBS = {
    "average": verb("average", "--inputs", "PATH", "PATH", "--output", "OUT"),
    "convert": verb("convert", "PATH", "OUT", "--to", "moh", "--force"),
}


@pytest.mark.thorough(keep=("model is none", "optimizer_history is none"), one_in=3)
@pytest.mark.parametrize("name", malformed.NAMES)
def test_a_malformed_checkpoint_gets_a_paragraph(
    name, sound, toy_data, resume, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "malformed.pt"
    malformed.write(name, copy.deepcopy(sound), path)
    monkeypatch.chdir(tmp_path)
    ways = {"generate": generate, "validate": validate, "resume": resume}
    ways |= {way: functools.partial(load, capsys) for way, load in VERBS.items()}
    wrong = []
    taken = []
    for way, load in ways.items():
        try:
            load(path, toy_data, sound["cfg"])
            taken.append(way)
        except UserError as error:
            named = "malformed.pt" in str(error) or "The criterion cannot be built" in str(
                error
            )
            if not named or "\n" in str(error) or len(str(error)) > 1500:
                wrong.append(f"{way}: {str(error)[:300]}")
        except FileNotFoundError:  # fairseq's own message, which is printed without a traceback
            continue
        except (Exception, SystemExit) as error:
            wrong.append(f"{way}: {error!r:.300}")
    assert not wrong, "\n".join(wrong)
    if name in malformed.DANGEROUS:
        assert not taken
    # A training is told its model by its own flags, and an average builds none
    if name in malformed.HEAVY:
        assert set(taken) <= {"resume", "average"}


def test_a_data_set_that_is_not_there_gets_a_paragraph(capsys):
    error = FileNotFoundError("Dataset not found: test (data-bin)")
    print_user_errors(type(error), error, None)
    assert capsys.readouterr().err.endswith(f": error: {error}\n")


def test_a_list_in_several_places_of_the_settings_counts_each_time():
    """OmegaConf copies it for each place."""
    state = {"model": {"w": torch.ones(1)}, "cfg": {"task": {"x": malformed.nested(12, 10)}}}
    with pytest.raises(UserError, match=r"x\.pt .* more than 100,000 values"):
        check_checkpoint(state, "x.pt", 4)


def test_a_task_and_a_model_need_no_longest_sentence():
    model = torch.nn.Linear(1, 1)
    _check_limits(model)
    model.max_positions = lambda: (9, 0)
    with pytest.raises(ValueError, match="longest sentence"):
        _check_limits(model)


def test_a_best_loss_may_be_a_tensor_of_one_number():
    """As the times that several processes sum up."""
    for name in ("best", "previous_training_time"):
        _check_progress(3, {"train_iterator": {}, name: torch.tensor([4.0])})
        with pytest.raises(ValueError, match=name):
            _check_progress(3, {"train_iterator": {}, name: "4.0"})
