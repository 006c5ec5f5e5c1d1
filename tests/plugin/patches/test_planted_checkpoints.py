"""What a checkpoint says is data: none of these planted ones runs or writes anything, however it is loaded.

Each attack would create a file called `marker`. Commands run in this process, of the few hundred pairs of an
attack and a way to load those that differ: the first attacks go every way, the others the ways that build all
that fairseq builds from a checkpoint's configuration.
"""

import copy
import io
import shutil
import sys
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils, file_utils, hub_utils, utils
from fairseq.models.roberta import RobertaModel
from fairseq_cli import eval_lm, generate, interactive, train, validate

from moa_fairseq.cli import main as moa_fairseq
from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches.foreign_settings import FAIRSEQ_HOST, LocalFiles, forget_outputs

TOY = ("--cpu", "--num-workers", "0")
SMALL = ("--encoder-layers", "1", "--decoder-layers", "1", "--share-all-embeddings")


class Run:
    """Unpickling an instance would create the marker."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def code(marker):
    """An expression that creates the marker and is worth a list of one convolution."""
    return f"__import__('pathlib').Path({str(marker)!r}).touch() or [(8, 3)]"


def filled(fields, marker):
    """True stands for code, "MARKER" for the marker's path."""
    values = {True: code(marker), "MARKER": str(marker)}
    return {
        name: values.get(value, value) if isinstance(value, (bool, str)) else value
        for name, value in fields.items()
    }


def model(arch, **fields):
    """An attack: the model is `arch` with these settings."""

    def plant(state, marker):
        old = vars(state["cfg"]["model"])
        state["cfg"]["model"] = Namespace(
            **{**old, "arch": arch, "_name": arch, **filled(fields, marker)}
        )

    return plant


def section(name, **fields):
    """An attack on another part of the configuration; a criterion has no settings but these."""

    def plant(state, marker):
        old = {} if name == "criterion" else state["cfg"].get(name) or {}
        state["cfg"][name] = {**old, **filled(fields, marker)}

    return plant


def multilingual(state, marker):
    """A task whose settings are flat arguments."""
    old = {
        **vars(state["cfg"]["model"]),
        "lang_pairs": "en-de",
        "source_lang": "en",
        "target_lang": "de",
    }
    old.update(task="multilingual_translation", _name="multilingual_translation")
    state["cfg"]["task"] = Namespace(
        **{**old, "left_pad_source": code(marker), "left_pad_target": "False"}
    )


def old_args(**fields):
    """An attack on the flat arguments that older fairseq saved."""

    def plant(state, marker):
        old = {**vars(state["cfg"]["model"]), "task": "translation", **filled(fields, marker)}
        state["cfg"], state["args"] = None, Namespace(**old)

    return plant


def pickled(state, marker):
    state["extra_state"]["meters"] = Run(marker)


def pickled_settings(state, marker):
    state["cfg"]["model"].encoder_layers = Run(marker)


class Hooked:
    """Unpickles as a weight with a backward hook, which torch itself would not write."""

    def __init__(self, hook):
        self.hook = hook

    def __reduce__(self):
        storage = torch.zeros(1).storage()
        return torch._utils._rebuild_tensor_v2, (
            storage,
            0,
            (1,),
            (1,),
            True,
            OrderedDict({0: self.hook}),
        )


def hooks(state, marker):
    state["model"]["hooked"] = Hooked(Run(marker))


def user_dir(state, marker):
    folder = marker.with_name("evil")
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text(f"open({str(marker)!r}, 'w')\n")
    state["cfg"]["common"]["user_dir"] = str(folder)
    state["cfg"]["model"].user_dir = str(folder)


def fasta(state, marker):
    """fairseq counts a FASTA file by a shell command that holds its path."""
    data = marker.with_name("x;touch marker;")
    if not data.is_dir():
        shutil.copytree(state["cfg"]["task"]["data"], data)
        for side in "en", "de":
            for split in "train", "valid", "test":
                (data / f"{split}.en-de.{side}.fasta").write_text(">a\nw1\n")
    state["cfg"]["task"].update(data=str(data), dataset_impl="fasta")


TARGET = {"_target_": "pathlib.Path.touch", "_args_": ["marker"]}
GPT2 = {
    "_name": "gpt2",
    "gpt2_encoder_json": "http://localhost/x",
    "gpt2_vocab_bpe": "http://localhost/y",
}
KERNELS = {
    **{f"{side}_kernel_size_list": [3] for side in ("encoder", "decoder")},
    **{f"{side}_conv_type": "lightweight" for side in ("encoder", "decoder")},
    **{
        "weight_softmax": True,
        "encoder_glu": False,
        "decoder_glu": False,
        "weight_dropout": 0.0,
    },
    **{"encoder_conv_dim": 64, "decoder_conv_dim": 64},
}
ATTACKS = {
    "pickle": pickled,
    "pickle-in-settings": pickled_settings,
    "hooks": hooks,
    "user-dir": user_dir,
    "fasta-shell": fasta,
    "fconv.encoder_layers": model("fconv", encoder_layers=True),
    "fconv.decoder_attention": model(
        "fconv", encoder_layers="[(8, 3)]", decoder_attention=True
    ),
    "fconv_self_att.pretrained": model("fconv_self_att", pretrained=True),
    "lightconv.kernel_sizes": model(
        "lightconv", **{**KERNELS, "encoder_kernel_size_list": True}
    ),
    "transformer_lm.filters": model(
        "transformer_lm", character_embeddings=True, character_filters=True
    ),
    "transformer.adaptive_softmax": model(
        "transformer_iwslt_de_en", adaptive_softmax_cutoff=True
    ),
    "moa.encoder_layers": model("moa_transformer_tiny", encoder_layers=True),
    "wav2vec2.conv_feature_layers": model("wav2vec2", conv_feature_layers=True),
    "model-target": model(
        "moa_transformer_tiny", _target_="pathlib.Path.touch", hooks=[TARGET]
    ),
    "task-target": section("task", **TARGET),
    "task.left_pad_source": multilingual,
    "ctc.wer_args": section("criterion", _name="ctc", wer_args=True),
    "sentence_ranking.save_predictions": section(
        "criterion",
        _name="sentence_ranking",
        ranking_head_name="x",
        num_classes=2,
        save_predictions="MARKER",
    ),
    "adam.adam_betas": section("optimizer", _name="adam", adam_betas=True),
    "lr_scheduler": section("lr_scheduler", _name="manual", epoch2lr=True, update2lr=True),
    "common.model_overrides": section(
        "common_eval", model_overrides=True, results_path="MARKER"
    ),
    "save-dir": section(
        "checkpoint", save_dir="MARKER", write_checkpoints_asynchronously=False
    ),
    "tensorboard": section("common", tensorboard_logdir="MARKER", log_file="MARKER"),
    "bpe-url": section("bpe", **GPT2),
    "tokenizer": section("tokenizer", _name="moses", source_lang=True, target_lang=True),
    "old-args.adam_betas": old_args(optimizer="adam", adam_betas=True, lr=True),
    "old-args.bpe": old_args(bpe="../../../evil", tokenizer="${oc.env:HOME}"),
    "old-args.fconv": old_args(arch="fconv", encoder_layers=True),
}


def command(module, *words):
    def run(monkeypatch):
        monkeypatch.setattr(sys, "argv", ["fairseq", *map(str, words)])
        module.cli_main()

    return run


def restored(flag):
    def load(path, data, monkeypatch):
        line = [
            data,
            *TOY,
            *SMALL,
            "--arch",
            "moa_transformer_tiny",
            "--optimizer",
            "adam",
            "--lr",
            "0.003",
        ]
        line += [
            "--max-tokens",
            400,
            "--max-epoch",
            1,
            "--no-save",
            "--save-dir",
            path.with_name("out"),
        ]
        monkeypatch.setattr(checkpoint_utils.save_checkpoint, "best", 1.0, raising=False)
        command(train, *line, flag, path)(monkeypatch)

    return load


def interacted(path, data, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2\n"))
    command(interactive, data, *TOY, "--path", path)(monkeypatch)


def validated(path, data, monkeypatch):
    line = (data, *TOY, "--path", path, "--valid-subset", "test", "--max-tokens", 400)
    command(validate, *line, "--task", "translation")(monkeypatch)


def language_modelled(path, data, monkeypatch):
    shutil.copy(data / "dict.en.txt", path.with_name("dict.txt"))
    command(eval_lm, path.parent, *TOY, "--path", path, "--gen-subset", "test")(monkeypatch)


def overriding(path, data, monkeypatch):
    checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], arg_overrides={"data": str(data)}
    )


def as_it_says(path, data, monkeypatch):
    """With the data that the checkpoint itself names."""
    _, _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    task.load_dataset("valid")


def from_hub(path, data, monkeypatch):
    parts = hub_utils.from_pretrained(str(path.parent), path.name, str(data))
    hub_utils.GeneratorHubInterface(parts["args"], parts["task"], parts["models"]).translate(
        "w1 w2"
    )


def verb(*words):
    def load(path, data, monkeypatch):
        files = {"PATH": path, "DATA": data, "OUT": path.with_name("out.png")}
        if moa_fairseq([str(files.get(word, word)) for word in words]):
            raise UserError("the reason is on stderr")

    return load


WAYS = {
    "train: resume": restored("--restore-file"),
    "train: finetune": restored("--finetune-from-model"),
    "generate": lambda path, data, monkeypatch: command(generate, data, *TOY, "--path", path)(
        monkeypatch
    ),
    "interactive": interacted,
    "validate": validated,
    "eval-lm": language_modelled,
    "load_model_ensemble_and_task": overriding,
    "load, with its own data": as_it_says,
    "hub": from_hub,
    "RobertaModel": lambda path, data, _: RobertaModel.from_pretrained(
        str(path.parent), path.name, str(data)
    ),
    "average": verb("average", "--inputs", "PATH", "PATH", "--output", "OUT"),
    "analyze expert-load": verb(
        "analyze", "expert-load", "PATH", "--data", "DATA", "--cpu", "--output", "OUT"
    ),
    "analyze gates": verb(
        "analyze", "gates", "PATH", "--data", "DATA", "--cpu", "--output", "OUT"
    ),
    "fill-mask": verb("fill-mask", "PATH", "a <mask>", "--data", "DATA"),
    "score --masked-lm": verb("score", "--masked-lm", "PATH", "--data", "DATA", "--cpu"),
}


EVERY_WAY = ("pickle", "hooks", "user-dir", "fconv.encoder_layers", "ctc.wer_args")
THOROUGH_WAYS = ("validate", "hub", "load, with its own data")
# what ran before there was a patch, and where; `validate` builds the criterion, the others do not
BUILDS_NO_MODEL = {"train: resume", "train: finetune", "average"}
PAIRS = [
    (attack, way)
    for attack in ATTACKS
    for way in WAYS
    if attack in EVERY_WAY or way in THOROUGH_WAYS
]


@pytest.fixture(scope="module")
def sound(toy_checkpoint):
    """The state that attacks are planted in."""
    return torch.load(toy_checkpoint, weights_only=False)


def downloaded(url, marker):
    """fairseq's own address of GPT-2's files stands in every masked LM; any other is the attacker's."""
    if "fbaipublicfiles" not in url:
        marker.touch()
    raise OSError(f"no network: {url}")


@pytest.mark.thorough(
    keep=("pickle-generate", "pickle-train: resume", "pickle-average"), one_in=3
)
@pytest.mark.parametrize(("attack", "way"), PAIRS)
def test_a_planted_checkpoint_does_nothing(
    attack, way, sound, toy_data, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "planted.pt"
    marker = tmp_path / "marker"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(utils.import_user_module, "memo", set(), raising=False)
    monkeypatch.setattr(
        file_utils, "get_from_cache", lambda url, folder=None: downloaded(url, marker)
    )
    state = copy.deepcopy(sound)
    ATTACKS[attack](state, marker)
    torch.save(state, path)
    error = None
    try:
        WAYS[way](path, toy_data, monkeypatch)
    except (Exception, SystemExit) as raised:
        error = raised
    assert not marker.exists(), f"it ran ({error!r})"
    if attack in ("pickle", "hooks"):
        assert "was refused: it holds" in f"{error}{capsys.readouterr().err}"
    elif attack == "fconv.encoder_layers" and way not in BUILDS_NO_MODEL:
        assert "The setting encoder_layers is refused" in f"{error}{capsys.readouterr().err}"
    elif (attack, way) == ("ctc.wer_args", "validate"):
        assert "The setting wer_args is refused" in str(error)


@pytest.mark.parametrize("scheme", ["http", "https", "s3"])
def test_a_tokenizers_file_is_fetched_from_nowhere_but_fairseqs_own_address(scheme):
    files = LocalFiles(
        SimpleNamespace(__name__="file_utils", cached_path=lambda name, cache_dir=None: name)
    )
    with pytest.raises(UserError, match=f"{scheme}://elsewhere"):
        files.cached_path(f"{scheme}://elsewhere/bpe/encoder.json")
    with pytest.raises(UserError, match="nothing was downloaded"):
        files.cached_path(f"{scheme}://{FAIRSEQ_HOST.removeprefix('dl.')}/encoder.json")
    own = f"https://{FAIRSEQ_HOST}/fairseq/gpt2_bpe/encoder.json"
    assert files.cached_path(own) == own


def test_outputs_are_forgotten_in_old_and_new_checkpoints():
    settings = {"tensorboard_logdir": "x", "lr": [1.0]}
    state = {
        "args": Namespace(**settings),
        "cfg": {"common": dict(settings), "model": Namespace(**settings)},
    }
    forget_outputs(state)
    for part in (vars(state["args"]), state["cfg"]["common"], vars(state["cfg"]["model"])):
        assert part == {"tensorboard_logdir": None, "lr": [1.0]}
    assert forget_outputs({"args": None, "cfg": None}) == {"args": None, "cfg": None}
