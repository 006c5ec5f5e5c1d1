"""Malformed checkpoints: name → what is done to a sound one before a command loads it.

`CASES` change the state that is saved; `FILES` make the file itself from a sound one. Both are listed by what
they change, so that a case can be added in one line.
"""

import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from argparse import Namespace

import torch

WEIGHT = "encoder.layers.0.fc1.weight"
NAN = float("nan")
HUGE = 10**12


def place(state, path):
    """Where a path such as "cfg/model/arch" leads (a dot is part of a weight's name): (container, key)."""
    names = path.split("/")
    for number, name in enumerate(names, 1):
        state = vars(state) if isinstance(state, Namespace) else state
        key = int(name) if isinstance(state, list) else name
        if number == len(names):
            return state, key
        state = state[key]


def put(path, value):
    """The value at a path is another one."""

    def change(state):
        container, key = place(state, path)
        container[key] = value

    return change


def drop(path):
    """There is nothing at a path."""

    def change(state):
        container, key = place(state, path)
        del container[key]

    return change


def whole(value):
    """The whole state is something else."""
    return lambda state: (value,)


def flat(**values):
    """An old checkpoint: flat arguments, of which some are other ones."""

    def change(state):
        old = {
            **state["cfg"]["task"],
            **vars(state["cfg"]["model"]),
            "task": "translation",
            **values,
        }
        state["cfg"], state["args"] = None, Namespace(**old)

    return change


def weights(change):
    """Each weight is changed."""
    return lambda state: put("model", {k: change(v) for k, v in state["model"].items()})(state)


def nested(depth, width=1):
    """A list in a list in a list …; width: how often each holds the next, which is one object."""
    value = ["x"]
    for _ in range(depth):
        value = [value] * width
    return value


def itself(state):
    state["cfg"]["task"]["itself"] = state["cfg"]


def optimizer(key, value):
    """A value in the state that the optimizer has for its first parameter."""

    def change(state):
        first = next(iter(state["last_optimizer_state"]["state"].values()))
        first[key] = value

    return change


SMALL = torch.ones(2, 3)
VALUES = {"none": None, "text": "x", "empty": {}}


def kinds(path, name=None):
    """Cases: what a path leads to is of another kind."""
    name = name or path.rpartition("/")[2]
    return {f"{name} is {what}": put(path, value) for what, value in VALUES.items()}


def each(path, values, name=""):
    """Cases: a setting below a path has another value; values: {setting: values}."""
    return {
        f"{name}{key} is {value!r}": put(f"{path}/{key}", value)
        for key, chosen in values.items()
        for value in chosen
    }


LIMITS = ("x", -1, HUGE)
COUNTS = (None, "x", -1, 1.5, HUGE)
CASES = {
    **{f"the whole is {what}": whole(value) for what, value in VALUES.items()},
    "the whole is a tensor": whole(SMALL),
    "the whole is a namespace": whole(Namespace(model={})),
    # the weights
    "model missing": drop("model"),
    **kinds("model"),
    "model has a number for a name": lambda state: state["model"].update({7: SMALL}),
    "model has the empty name": put("model/", SMALL),
    "model has a long name": put("model/" + "x." * 20_000, SMALL),
    **kinds(f"model/{WEIGHT}", "weight"),
    "weight is a namespace": put(f"model/{WEIGHT}", Namespace(shape=(2, 3))),
    "weight missing": drop(f"model/{WEIGHT}"),
    "weight too many": put("model/encoder.layers.9.fc1.weight", SMALL),
    "weight of another shape": put(f"model/{WEIGHT}", SMALL),
    "weight of no elements": put(f"model/{WEIGHT}", torch.empty(0)),
    "weight of one stored number": put(f"model/{WEIGHT}", torch.ones(1).expand(10**6, 10**6)),
    "weight sparse": put(f"model/{WEIGHT}", SMALL.to_sparse()),
    "weight on meta": put(f"model/{WEIGHT}", torch.empty(10**7, 10**7, device="meta")),
    "weight complex": put(f"model/{WEIGHT}", SMALL.to(torch.complex64)),
    "weight of booleans": put(f"model/{WEIGHT}", SMALL > 0),
    "weight of a byte": put(f"model/{WEIGHT}", SMALL.to(torch.float8_e4m3fn)),
    "weight nested": put(
        f"model/{WEIGHT}", torch.nested.nested_tensor([SMALL[0], SMALL[0, :1]])
    ),
    "weight quantized": put(
        f"model/{WEIGHT}", torch.quantize_per_tensor(SMALL, 0.1, 0, torch.qint8)
    ),
    "embedding of one row": put("model/encoder.embed_tokens.weight", torch.ones(1, 64)),
    "weights of integers": weights(lambda value: value.to(torch.int64)),
    "weights of NaN": weights(
        lambda value: value * NAN if value.is_floating_point() else value
    ),
    "an infinite weight": put(f"model/{WEIGHT}", SMALL * float("inf")),
    "torch.complex64 NaN": put(f"model/{WEIGHT}", (SMALL * NAN).to(torch.complex64)),
    "torch.float8_e4m3fn NaN": put(f"model/{WEIGHT}", (SMALL * NAN).to(torch.float8_e4m3fn)),
    "weights transposed": weights(lambda value: value.t() if value.dim() == 2 else value),
    # the configuration
    "cfg missing": drop("cfg"),
    **kinds("cfg"),
    "cfg is a namespace": lambda state: put("cfg", Namespace(**state["cfg"]))(state),
    "cfg holds a tensor": put("cfg/task/data", SMALL),
    "cfg holds itself": itself,
    "cfg 200 deep": put("cfg/task/x", nested(200)),
    "cfg holds 10^12 values": put("cfg/task/x", nested(12, 10)),
    "cfg interpolates nothing": put("cfg/task/data", "${nowhere.x}"),
    "cfg interpolates half": put("cfg/task/data", "${model"),
    "cfg leaves a value out": put("cfg/task/source_lang", "???"),
    "args is text": put("args", "x"),
    "args is empty": put("args", {}),
    "args is an empty namespace": put("args", Namespace()),
    **{
        f"cfg.{group} missing": drop(f"cfg/{group}")
        for group in (
            "model",
            "task",
            "criterion",
            "optimizer",
            "lr_scheduler",
            "common",
            "dataset",
        )
    },
    **kinds("cfg/model", "cfg.model"),
    **kinds("cfg/task", "cfg.task"),
    **kinds("cfg/criterion", "cfg.criterion"),
    # the model's settings
    **each("cfg/model", {"arch": (None, "nope", 3, [], "transformer")}),
    **each("cfg/model", {"_name": (None, "nope", 3, [], "lstm")}, "model."),
    **each(
        "cfg/model",
        {
            "encoder_layers": (None, "x", -1, 0, 1.5, HUGE, 10**30),
            "encoder_embed_dim": ("x", HUGE),
            "encoder_ffn_embed_dim": ("x", 0, 3, HUGE),
            "decoder_attention_heads": ("x", 0, 3),
            "num_experts": ("x", -1, 0, HUGE),
            "experts_per_token": ("x", -1, 999),
            "expert_dim": ("x", 0, HUGE),
            **{"max_source_positions": LIMITS, "max_target_positions": LIMITS},
            "dropout": ("x", 2.0, -1, NAN, None),
            "activation_fn": ("nope", 3, None),
            "expert_backend": ("nope", None, 3),
            "positions": ("nope", 3, "xl"),
            "share_all_embeddings": (False, "x"),
            "encoder_embed_path": ("/nowhere", "/dev/zero", "/", "/proc/self/exe"),
            "decoder_embed_path": ("/dev/zero",),
            "encoder_learned_pos": (True,),
            "adaptive_softmax_cutoff": ("1,2", "x", [3, 2, 1]),
            "encoder_layers_to_keep": ("x", "0,99"),
            "encoder_layerdrop": ("x", 2.0),
            "quant_noise_pq": ("x", 1.0),
            "base_layers": (2, HUGE),
            "decoder_input_dim": (7,),
            "decoder_layers": (2, 10**6, HUGE),
        },
    ),
    "encoder_layers missing": drop("cfg/model/encoder_layers"),
    "10^12 small layers": lambda state: vars(state["cfg"]["model"]).update(
        encoder_layers=HUGE, encoder_ffn_embed_dim=0
    ),
    # the task, and what it says for validation
    **each(
        "cfg/task",
        {
            "_name": (None, "nope", 3, "masked_lm"),
            "data": (None, 3, "/nowhere", "/dev/zero", "/dev/fd", []),
            "source_lang": (None, 3, "xx", "../en"),
            "left_pad_source": ("x", 3, None),
            "max_source_positions": ("x", -1, None, HUGE),
            "eval_bleu": (True, "x"),
            "dataset_impl": ("nope", "raw"),
            "load_alignments": (True,),
        },
        "task.",
    ),
    **each(
        "cfg/criterion",
        {
            "_name": (None, "nope", 3),
            "label_smoothing": ("x", None, NAN),
            "sentence_avg": ("x",),
            "ignore_prefix_size": ("x", -5),
        },
        "criterion.",
    ),
    # old checkpoints
    "old": flat(),
    "old with an unknown arch": flat(arch="nope"),
    "old with text for lr": flat(lr="x"),
    "old with HUGE layers": flat(encoder_layers=HUGE),
    # what a training goes on from
    "optimizer_history missing": drop("optimizer_history"),
    **kinds("optimizer_history"),
    "optimizer_history holds an empty entry": put("optimizer_history", [{}]),
    **each("optimizer_history/0", {"num_updates": (None, "x", NAN, -1, 10**30)}),
    "another criterion": put("optimizer_history/0/criterion_name", "Nope"),
    **kinds("optimizer_history/0/lr_scheduler_state"),
    "lr_scheduler_state is of text": put(
        "optimizer_history/0/lr_scheduler_state", {"best": "x"}
    ),
    **kinds("last_optimizer_state"),
    "optimizer state is None": put("last_optimizer_state/state", None),
    "optimizer has no groups": put("last_optimizer_state/param_groups", []),
    "optimizer has text for lr": put("last_optimizer_state/param_groups/0/lr", "x"),
    "optimizer has text for betas": put("last_optimizer_state/param_groups/0/betas", "x"),
    "optimizer has unknown parameters": put(
        "last_optimizer_state/param_groups/0/params", [999]
    ),
    "moments are text": optimizer("exp_avg", "x"),
    "moments of another shape": optimizer("exp_avg_sq", SMALL),
    "moments of one stored number": optimizer("exp_avg", torch.ones(1).expand(10**6, 10**6)),
    "moments on meta": optimizer("exp_avg", torch.empty(10**7, 10**7, device="meta")),
    "steps are text": optimizer("step", "x"),
    "extra_state missing": drop("extra_state"),
    **kinds("extra_state"),
    **kinds("extra_state/train_iterator"),
    **each("extra_state/train_iterator", {"epoch": COUNTS, "iterations_in_epoch": COUNTS}),
    "shuffle is text": put("extra_state/train_iterator/shuffle", "x"),
    **each("extra_state", {"best": ("x", [], NAN), "previous_training_time": ("x", [])}),
    **kinds("extra_state/metrics"),
    "a meter is unknown": put("extra_state/metrics/default", [(1, "x", "Nope", {})]),
    "a meter is text": put(
        "extra_state/metrics/default", [(1, "loss", "AverageMeter", {"val": "x", "sum": "x"})]
    ),
    **kinds("task_state"),
    "shards": put("fsdp_metadata", "x"),
}
CASES = {name.replace("/", "_"): change for name, change in CASES.items()}


# ---- files: bytes of a sound checkpoint → other bytes


def saved(state, **options):
    stream = io.BytesIO()
    torch.save(state, stream, **options)
    return stream.getvalue()


def rezipped(data, change=lambda name, content: content, method=zipfile.ZIP_STORED, more=()):
    """The same archive written anew; change(name, content) → content, or None to leave the member out."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", method) as new:
        for info in old.infolist():
            content = change(info.filename, old.read(info))
            if content is not None:
                new.writestr(info.filename, content)
        for name, content in more:
            new.writestr(name, content)
    return stream.getvalue()


def only(ending, content):
    return lambda data: rezipped(
        data, lambda name, old: content if name.endswith(ending) else old
    )


def inflating(data):
    """3 MB that inflate to 3 GB: the largest member is zeros."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        largest = max(old.infolist(), key=lambda info: info.file_size).filename
    packed = rezipped(
        data, lambda name, old: block * 192 + packer.flush() if name == largest else old
    )
    stream = io.BytesIO(packed)
    with zipfile.ZipFile(stream, "a") as archive:
        info = archive.getinfo(largest)
        info.compress_type = zipfile.ZIP_DEFLATED
        info.file_size = 192 << 24
        info.CRC = 1
        archive._didModify = True  # the directory is written anew
    return stream.getvalue()


def shared_members(data):
    """A directory in which every weight is the same largest member, many times."""
    stream = io.BytesIO(data)
    with zipfile.ZipFile(stream, "a") as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
        for number in range(5000):
            copy = zipfile.ZipInfo(f"x/data/more{number}")
            for name in ("header_offset", "CRC", "compress_size", "file_size"):
                setattr(copy, name, getattr(largest, name))
            archive.filelist.append(copy)
        archive._didModify = True
    return stream.getvalue()


def legacy(data, **options):
    return saved(
        torch.load(io.BytesIO(data), weights_only=False), _use_new_zipfile_serialization=False
    )


def tarred(data):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        info = tarfile.TarInfo("storages")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def legacy_with(pickled, data):
    """A file of torch < 1.6 whose content is another pickle."""
    head = io.BytesIO()
    pickle.dump(0x1950A86A20F9469CFC6C, head, 2)
    pickle.dump(1001, head, 2)
    pickle.dump({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, head, 2)
    return head.getvalue() + pickled + pickle.dumps([], 2)


def made_of(code):
    """Pickle: a call of a function that torch's own reader allows, with a huge argument."""
    return b"\x80\x02" + code + b"."


BYTES = made_of(
    b"cbuiltins\nbytearray\n" + b"\x8a\x05" + (10**10).to_bytes(5, "little") + b"\x85R"
)
TENSOR = made_of(b"ctorch\nTensor\n" + b"\x8a\x05" + (10**11).to_bytes(5, "little") + b"\x85R")
FILES = {
    "empty": lambda data: b"",
    "text": lambda data: b"a checkpoint\n" * 100,
    "noise": lambda data: bytes(range(256)) * 400,
    "the mark of a zip": lambda data: b"PK\x03\x04" + bytes(100),
    "an empty zip": lambda data: rezipped(data, lambda name, old: None),
    **{
        f"{percent} percent": lambda data, p=percent: data[: len(data) * p // 100]
        for percent in (1, 50, 99)
    },
    "the first byte missing": lambda data: data[1:],
    "something before": lambda data: b"x" * 100 + data,
    "something after": lambda data: data + b"x" * 100,
    "gzip": gzip.compress,
    "tar": tarred,
    "zip of a file": lambda data: rezipped(
        data, lambda name, old: None, more=[("checkpoint.pt", data)]
    ),
    "no data.pkl": lambda data: rezipped(
        data, lambda name, old: None if name.endswith("data.pkl") else old
    ),
    "no weights": lambda data: rezipped(
        data, lambda name, old: None if "/data/" in name else old
    ),
    "data.pkl empty": only("data.pkl", b""),
    "data.pkl half": lambda data: rezipped(
        data, lambda name, old: old[: len(old) // 2] if "pkl" in name else old
    ),
    "data.pkl of protocol 5": only("data.pkl", pickle.dumps({"model": {}}, 5)),
    "data.pkl asks for 10 GB": only("data.pkl", BYTES),
    "data.pkl asks for a large tensor": only("data.pkl", TENSOR),
    "data.pkl nested": only("data.pkl", b"\x80\x02" + b"]" * 100_000 + b"."),
    "data.pkl of unknown codes": only("data.pkl", b"\x80\x02\xff\xfe."),
    "version huge": only("version", b"9" * 400),
    "byteorder unknown": only("byteorder", b"middle"),
    "weights cut short": lambda data: rezipped(
        data, lambda name, old: old[:8] if "/data/" in name else old
    ),
    "weights too long": lambda data: rezipped(
        data, lambda name, old: old * 2 if "/data/" in name else old
    ),
    "deflated": lambda data: rezipped(data, method=zipfile.ZIP_DEFLATED),
    "lzma": lambda data: rezipped(data, method=zipfile.ZIP_LZMA),
    "3 MB for 3 GB": inflating,
    "shared members": shared_members,
    "TorchScript": lambda data: rezipped(data, more=[("archive/constants.pkl", b"x")]),
    "legacy": legacy,
    "legacy half": lambda data: legacy(data)[: len(data) // 2],
    "legacy without weights": lambda data: legacy_with(pickle.dumps({"model": {}}, 2), data),
    "legacy asks for 10 GB": lambda data: legacy_with(BYTES, data),
    **{
        f"pickle {n}": lambda data, n=n: pickle.dumps({"model": {}, "cfg": {}}, n)
        for n in (0, 5)
    },
    "pickle asks for 10 GB": lambda data: BYTES,
    "safetensors huge": lambda data: struct.pack("<Q", 2**60) + b"{}",
}
FIFO = "cfg.model.encoder_embed_path is a pipe"


def write(name, sound, path):
    """Write the malformed checkpoint of that name; sound: a state that may be changed."""
    if name in FILES:
        path.write_bytes(FILES[name](saved(sound)))
        return
    if name == FIFO:
        os.mkfifo(path.with_name("pipe"))
        sound["cfg"]["model"].encoder_embed_path = str(path.with_name("pipe"))
    else:
        changed = CASES[name](sound)
        sound = sound if changed is None else changed[0]
    torch.save(sound, path)


NAMES = [*CASES, *FILES, FIFO]
# what would hang, fill the memory or translate into nonsense: no way of loading the model takes it
DANGEROUS = (
    *("torch.complex64 NaN", "torch.float8_e4m3fn NaN"),
    *("weight complex", "weight of booleans", "weight of a byte", "weight nested"),
    *(
        "weights of NaN",
        "an infinite weight",
        "weight of one stored number",
        "weight on meta",
        "cfg holds 10^12 values",
    ),
    *("deflated", "3 MB for 3 GB", "data.pkl asks for 10 GB", "legacy asks for 10 GB"),
)
HEAVY = (
    *("encoder_layers is 1000000000000", "expert_dim is 1000000000000", "10^12 small layers"),
    *("max_source_positions is 1000000000000", "encoder_embed_path is '_dev_zero'", FIFO),
)
