"""Shared fixtures: a toy parallel corpus, binarised once, and fairseq's commands as subprocesses."""

import json
import multiprocessing
import random
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import hydra
import portalocker
import pytest
import torch
from commands import Command, Forked, start_the_server
from fairseq import options, tasks
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from fairseq.dataclass import utils as dataclass_utils
from fairseq.trainer import Trainer
from fairseq_cli import preprocess as fairseq_preprocess
from host_waits import TRITON
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import moa_fairseq
from moa_fairseq import process
from moa_fairseq.cli import Console, reporting_to
from moa_fairseq.experiments.data import language_model_steps
from moa_fairseq.experiments.data.gpt2_files import Gpt2Files
from moa_fairseq.experiments.data.prepare import Preparation
from moa_fairseq.layers.experts import projection
from moa_fairseq.layers.sequence_gate import gates_of
from moa_fairseq.process import Executor, flags

moa_fairseq.register()  # a folder's conftest.py may have imported the package before fairseq was there
USER_DIR = str(Path(moa_fairseq.__file__).parent)
ONE_LAYER = ("--encoder-layers", 1, "--decoder-layers", 1, "--share-all-embeddings")


@pytest.fixture(scope="session", autouse=True)
def _server():
    start_the_server()
    yield
    for (
        child
    ) in multiprocessing.active_children():  # of a test that failed; Python would wait for it
        child.kill()


@pytest.fixture(scope="module")
def forked_commands():
    """Recipes start their commands without importing fairseq anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            process,
            "subprocess",
            SimpleNamespace(**{**vars(process.subprocess), "Popen": Forked}),
        )
        yield


class Composer:
    """hydra's `compose`: what is composed already is changed where the next settings differ.

    hydra takes half a second each time, which was most of a test that trains in this process.
    """

    def __init__(self):
        self.composed = {}

    def __call__(self, name, overrides, **options):
        texts = dict(override.partition("=")[::2] for override in overrides)
        choices = tuple((key, text) for key, text in texts.items() if "." not in key)
        cfg, before = self.composed.pop(choices, (None, {}))
        if before.keys() != texts.keys():
            cfg = hydra.compose(name, overrides=overrides, **options)
        else:
            parser = OverridesParser.create()
            changed = [f"{key}={text}" for key, text in texts.items() if before[key] != text]
            for override in parser.parse_overrides(changed):
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
        self.composed[choices] = cfg, texts
        return cfg


@pytest.fixture(scope="session", autouse=True)
def _composer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataclass_utils, "compose", Composer())
        yield


class Fairseq:
    """Runs fairseq's commands on one thread, each in a process of its own, and keeps what they write."""

    def __call__(
        self,
        name,
        *args,
        check=True,
        killed_at=None,
        number=signal.SIGKILL,
        timeout=300,
        **options,
    ):
        """killed_at: what it has written when it gets the signal of that number; such a run is not checked.

        stdin, cwd, env: as of `Command`.
        """
        started = Command(name, *args, **options)
        if killed_at:
            started.said_until(killed_at)
            started.send_signal(number)
        done = started.end(timeout)
        if check and not killed_at and done.returncode:
            raise AssertionError(
                f"{' '.join(done.args)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        return done

    def pair(self, *args):
        """Start a training in two processes."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        world = (
            "--distributed-world-size",
            2,
            "--distributed-no-spawn",
            "--distributed-backend",
            "gloo",
        )
        world += ("--ddp-backend", "legacy_ddp", "--distributed-init-method", address)
        return [Command("train", *args, *world, "--distributed-rank", rank) for rank in (0, 1)]

    def together(self, *args):
        """Train in two processes; returns what the first of them wrote."""
        ends = [each.end() for each in self.pair(*args)]
        assert not any(end.returncode for end in ends), "".join(
            end.stderr[-2500:] for end in ends
        )
        return ends[0].stdout + ends[0].stderr

    def words(self, data, save_dir, *args, arch="moa_transformer_tiny"):
        """Of a training: one layer each way, a few updates per epoch, JSON log lines, CPU."""
        line = (data, "--user-dir", USER_DIR, "--cpu", "--arch", arch, *ONE_LAYER)
        line += (
            "--optimizer",
            "adam",
            "--lr",
            0.003,
            "--max-tokens",
            400,
            "--num-workers",
            0,
            "--seed",
            7,
        )
        line += (
            "--criterion",
            "label_smoothed_cross_entropy_with_routing",
            "--label-smoothing",
            0.1,
        )
        return [
            *line,
            "--log-format",
            "json",
            "--log-interval",
            1,
            "--save-dir",
            save_dir,
            *args,
        ]

    def train(self, data, save_dir, *args, arch="moa_transformer_tiny", **options):
        return self("train", *self.words(data, save_dir, *args, arch=arch), **options)


@pytest.fixture
def said():
    """The lines that recipes report while the test runs."""
    lines = []
    with reporting_to(Console(lines.append)):
        yield lines


@pytest.fixture(scope="session")
def fairseq():
    return Fairseq()


@pytest.fixture(scope="session")
def once(request, tmp_path_factory):
    """once(name, make) → the folder that make(folder) has filled, once for all workers of pytest-xdist."""
    place = tmp_path_factory.getbasetemp()
    place = place.parent if hasattr(request.config, "workerinput") else place

    def once(name, make):
        folder = place / name
        made = place / f"{name}.made"
        with portalocker.Lock(place / f"{name}.lock", timeout=300):
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
                folder.mkdir()
                make(folder)
                made.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def toy_data(once, fairseq):
    """A binarised corpus en → de: the target is the source reversed. 120 + 20 + 12 sentences."""
    return once("toy", lambda folder: make_toy_data(folder, fairseq)) / "bin"


def make_toy_data(folder, fairseq):
    generator = random.Random(0)
    words = [f"w{i}" for i in range(30)]
    for split, size in (("train", 120), ("valid", 20), ("test", 12)):
        rows = [
            [generator.choice(words) for _ in range(generator.randint(2, 9))]
            for _ in range(size)
        ]
        (folder / f"{split}.en").write_text("".join(" ".join(row) + "\n" for row in rows))
        (folder / f"{split}.de").write_text("".join(" ".join(row[::-1]) + "\n" for row in rows))
    prefixes = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    words = (
        "-s",
        "en",
        "-t",
        "de",
        *prefixes,
        "--destdir",
        folder / "bin",
        "--joined-dictionary",
    )
    fairseq("preprocess", *words)


@pytest.fixture(scope="session")
def toy_checkpoint(once, fairseq, toy_data):
    """A tiny MoA model after two epochs on `toy_data`; treat its folder as read-only."""
    folder = once(
        "toy_checkpoints", lambda folder: fairseq.train(toy_data, folder, "--max-epoch", 2)
    )
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def preprocess():
    """An executor that runs fairseq-preprocess in this process."""

    class InProcess(Executor):
        def run(self, command, log, output=None, on_line=None, errors_too=False):
            assert command[0] == "fairseq-preprocess"
            words = [*command[1:], "--workers", "1"]
            fairseq_preprocess.main(options.get_preprocessing_parser().parse_args(words))

        def __call__(self, values):
            self.run(["fairseq-preprocess", *flags(values)], None)

    return InProcess()


@pytest.fixture(scope="session")
def toy_gpt2(tmp_path_factory):
    """A byte-pair encoding in GPT-2's format: 256 bytes, a few merges, and their ids as a dictionary."""
    folder = tmp_path_factory.mktemp("gpt2")
    symbols = list(bytes_to_unicode().values())
    merges = [
        ("Ġ", "t"),
        ("h", "e"),
        ("Ġt", "he"),
        ("c", "a"),
        ("ca", "t"),
        ("Ġ", "cat"),
        ("s", "a"),
    ]
    encoder = {
        symbol: number for number, symbol in enumerate([*symbols, *map("".join, merges)])
    }
    (folder / "encoder.json").write_text(json.dumps(encoder))
    (folder / "vocab.bpe").write_text("#version\n" + "".join(f"{a} {b}\n" for a, b in merges))
    (folder / "dict.txt").write_text("".join(f"{number} 1\n" for number in encoder.values()))
    return Gpt2Files(
        folder / "encoder.json", folder / "vocab.bpe", folder / "dict.txt", "roberta"
    )


@pytest.fixture(scope="session")
def toy_wiki(tmp_path_factory):
    """WikiText's look: headings, empty lines, @-@ and <unk>. 160 + 40 + 40 lines."""
    folder = tmp_path_factory.mktemp("wiki")
    generator = random.Random(5)
    words = ["the", "cat", "sat", "on", "mat", "well", "@-@", "known", "<unk>", ",", "."]
    for split, size in (("train", 80), ("valid", 20), ("test", 20)):
        rows = [
            " ".join(generator.choices(words, k=generator.randint(2, 12))) for _ in range(size)
        ]
        (folder / f"wiki.{split}.raw").write_text(
            "".join(f" \n {row} \n" for row in rows), encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="session")
def toy_wiki_data(tmp_path_factory, toy_wiki, toy_gpt2, preprocess):
    """`toy_wiki` encoded by `toy_gpt2` and binarised; treat it as read-only."""

    settings = {"recipe": "text_gpt2bpe", "flags": {}}
    source = tmp_path_factory.mktemp("source")
    for path in toy_wiki.iterdir():
        (source / path.name.replace("wiki.", "")).write_bytes(path.read_bytes())
    root = tmp_path_factory.mktemp("toy_wiki")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            language_model_steps, "obtain_gpt2_files", lambda folders, offline: toy_gpt2
        )
        return (
            Preparation(settings, ["train", "valid", "test"], source, root, preprocess)
            .run()
            .folder
        )


@pytest.fixture(scope="session")
def train_masked_lm(fairseq, toy_wiki_data):
    """train_masked_lm(save_dir, *flags) trains a one-layer masked LM on `toy_wiki_data`."""

    def train(
        save_dir, *args, arch="moa_roberta_tiny", criterion="masked_lm_with_routing", **options
    ):
        line = (
            toy_wiki_data,
            "--user-dir",
            USER_DIR,
            "--cpu",
            "--task",
            "masked_lm",
            "--arch",
            arch,
        )
        line += (
            "--encoder-layers",
            1,
            "--encoder-embed-dim",
            16,
            "--encoder-ffn-embed-dim",
            16,
        )
        line += (
            "--tokens-per-sample",
            24,
            "--max-positions",
            24,
            "--optimizer",
            "adam",
            "--lr",
            0.01,
        )
        line += ("--max-tokens", 240, "--num-workers", 0, "--seed", 7, "--log-format", "json")
        return fairseq(
            "train", *line, "--criterion", criterion, "--save-dir", save_dir, *args, **options
        )

    return train


@pytest.fixture(scope="session")
def toy_masked_lm(once, train_masked_lm):
    """A tiny masked LM with mixtures after two epochs; treat its folder as read-only."""
    folder = once("toy_masked_lm", lambda folder: train_masked_lm(folder, "--max-epoch", 2))
    return folder / "checkpoint_last.pt"


@pytest.fixture
def build_trainer(toy_data):
    """build_trainer(*flags) → (fairseq's trainer in this process, micro-batches of the first epoch).

    common: settings of fairseq's common section that its parser does not let through on a CPU.
    """

    def build(
        *flags,
        data=toy_data,
        arch="mae_transformer_tiny",
        task="translation_bcd",
        model=None,
        common=(),
    ):
        torch.manual_seed(3)
        model = ONE_LAYER if model is None else model
        base = [str(data), "--arch", arch, "--task", task, "--cpu"]
        base += [
            "--optimizer",
            "adam",
            "--lr",
            0.01,
            "--dropout",
            0,
            "--seed",
            7,
            "--max-tokens",
            100,
        ]
        base += ["--num-workers", 0]
        words = [str(word) for word in (*base, *model, *flags)]
        args = options.parse_args_and_arch(options.get_training_parser(), words)
        cfg = dataclass_utils.convert_namespace_to_omegaconf(args)
        cfg.common.update(common)
        task = tasks.setup_task(cfg.task)
        trainer = Trainer(
            cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion)
        )
        batches = trainer.get_train_iterator(1).next_epoch_itr(shuffle=False)
        return trainer, list(batches)

    return build


@pytest.fixture
def as_by_triton(monkeypatch):
    """`expert_backend="triton"` on a CPU, by what waits as little."""
    monkeypatch.setattr(projection, "triton", TRITON)


OF_AN_UNTRAINED_MODEL = {
    "translation": [
        *("--source-lang", "en", "--target-lang", "de", "--share-all-embeddings"),
        *("--encoder-layers", 2, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16),
        *("--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16),
    ],
    "language_modeling": [
        *("--tokens-per-sample", 12, "--sample-break-mode", "complete", "--decoder-layers", 2),
        *("--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16, "--gate-window", 4),
    ],
}


@pytest.fixture(scope="session")
def save_model():
    """save_model(data, path, *flags, task=, arch=) writes a checkpoint as fairseq-train would."""

    def save(
        data, path, *flags, task="translation", arch="mae_transformer_tiny", gate_scale=40.0
    ):
        torch.manual_seed(11)
        words = [
            data,
            "--task",
            task,
            "--arch",
            arch,
            "--cpu",
            *OF_AN_UNTRAINED_MODEL[task],
            *flags,
        ]
        args = options.parse_args_and_arch(
            options.get_training_parser(task), [str(word) for word in words]
        )
        cfg = dataclass_utils.convert_namespace_to_omegaconf(args)
        model = tasks.setup_task(cfg.task).build_model(cfg.model)
        for gate in gates_of(model):
            torch.nn.init.normal_(gate.fc1.weight, std=gate_scale / 10)
            torch.nn.init.normal_(gate.fc2.weight, std=1.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        cfg = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
        history = {
            "criterion_name": "X",
            "optimizer_name": "X",
            "lr_scheduler_state": {},
            "num_updates": 1,
        }
        state = {
            "args": None,
            "cfg": cfg,
            "model": model.state_dict(),
            "optimizer_history": [history],
        }
        torch.save({**state, "extra_state": {"train_iterator": {"epoch": 1}}}, path)
        return path

    return save


@pytest.fixture(scope="session")
def text_data(tmp_path_factory, toy_data, preprocess):
    """The source side of `toy_data`, binarised for language models."""
    folder = tmp_path_factory.mktemp("text") / "bin"
    texts = {
        f"{split}pref": str(toy_data.parent / f"{split}.en") for split in ("train", "valid")
    }
    preprocess({"only-source": True, "destdir": str(folder), **texts})
    return folder


@pytest.fixture
def interrupted_start(monkeypatch):
    """Ctrl-C comes while a program is started, which would sleep for a minute; the list has its process."""
    popen = subprocess.Popen
    started = []

    def start(_, **options):
        started.append(popen(["sleep", "60"], **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    # Where the tests run in the background SIGINT is ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield started
    signal.signal(signal.SIGINT, before)
    for child in started:
        child.kill()
        child.wait()
