"""A training update asks the device no more often than fairseq's dense model does, however many layers.

What the host of a GPU would wait for is counted on a CPU: everything that asks for the content of a tensor.
"""

import functools

import pytest
import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq.sequence_generator import SequenceGenerator
from fairseq.utils import apply_to_sample
from host_waits import host_waits, listed

from moa_fairseq.plugin.forward_context import current_context
from moa_fairseq.plugin.patches import host_tokens

TRANSLATION = ("--criterion", "label_smoothed_cross_entropy")
ROUTED = ("--criterion", "label_smoothed_cross_entropy_with_routing")
MASKED_LM = (
    "--criterion",
    "masked_lm_with_routing",
    "--tokens-per-sample",
    24,
    "--max-positions",
    24,
)
NARROW = ("--encoder-embed-dim", 16)
EVERY = ("--num-experts", 4, "--experts-per-token", 4)
SPARSE = ("--num-experts", 4, "--experts-per-token", 2, "--expert-backend", "triton")
# name → (architecture, task, flags); the first of each task is fairseq's own
MODELS = {
    "dense": ("transformer", "translation", (*TRANSLATION, *NARROW)),
    "moa": ("moa_transformer_tiny", "translation", (*ROUTED, *EVERY)),
    "moa, bias rate": (
        "moa_transformer_tiny",
        "translation",
        (*ROUTED, *SPARSE, "--routing-bias-rate", 0.1, "--router-log", "modules"),
    ),
    "mae, joint": ("mae_transformer_tiny", "translation_bcd", (*TRANSLATION, "--bcd", "none")),
    "dense masked": (
        "roberta",
        "masked_lm",
        (*NARROW, "--encoder-attention-heads", 2, *MASKED_LM),
    ),
    "moa masked": ("moa_roberta_tiny", "masked_lm", (*MASKED_LM, *SPARSE)),
}


@pytest.fixture
def waits_of(build_trainer, toy_wiki_data, monkeypatch, as_by_triton):
    """waits_of(name, layers) → where the second update waited: one of two workers."""

    @functools.cache
    def run(name, layers):
        arch, task, flags = MODELS[name]
        if task == "masked_lm":
            model = ("--encoder-layers", layers)
            data = {"data": toy_wiki_data}
        else:
            model = (
                "--encoder-layers",
                layers,
                "--decoder-layers",
                layers,
                "--share-all-embeddings",
            )
            model = (*model, "--label-smoothing", 0.1)
            data = {}
            if arch == "transformer":
                model = (*model, "--decoder-embed-dim", 16)
        trainer, batches = build_trainer(*flags, arch=arch, task=task, model=model, **data)
        # what is logged meets on the device, where all workers add theirs up
        monkeypatch.setattr(trainer, "_sync_stats", lambda: True)
        monkeypatch.setattr(distributed_utils, "all_reduce", lambda tensor, group: tensor)
        trainer.begin_epoch(1)
        with metrics.aggregate(new_root=True):
            trainer.train_step(batches[:1])
            with host_waits() as places:
                trainer.train_step(batches[1:3])
        return places

    return run


@pytest.mark.thorough(keep=("[moa]", "[moa, bias rate]", "[moa masked]"))
@pytest.mark.parametrize("name", [name for name in MODELS if "dense" not in name])
def test_an_update_waits_as_rarely_as_a_dense_one_for_any_number_of_layers(waits_of, name):
    """One copy of all that the routers log."""
    one = waits_of(name, 1)
    three = waits_of(name, 3)
    assert one.total() == three.total(), listed(three - one)
    dense = waits_of("dense masked" if "masked" in name else "dense", 1)
    # The norm of the gates' gradients, and twice whether it is finite
    own = 3 if name == "mae, joint" else 0
    assert three.total() <= dense.total() + own, listed(three) + "\n\ndense:\n" + listed(dense)


BY_TRITON = ("--expert-backend", "triton")
# Ids, and sizes, in the host's memory
NOT_DEVICES = {
    "host_tokens.py",
    "sinusoidal_positional_embedding.py",
}


@pytest.mark.thorough(keep="moa_transformer_tiny")
@pytest.mark.parametrize(
    ("arch", "flags"),
    {
        "moa_transformer_tiny": SPARSE,
        "mae_transformer_tiny": ("--bcd", "none"),
        "moh_transformer_tiny": (),
        "gqe_transformer_tiny": BY_TRITON,
        "namoh_transformer_tiny": (),
        "switchhead_transformer_tiny": BY_TRITON,
        "switchhead_lm_tiny": BY_TRITON,
    }.items(),
)
def test_no_model_waits_for_the_device(
    build_trainer, toy_wiki_data, monkeypatch, as_by_triton, arch, flags
):
    """Forward and backward passes could be one CUDA graph. The batch is copied, as it is for a GPU."""
    language = "_lm_" in arch
    task = (
        "language_modeling"
        if language
        else "translation_bcd"
        if "mae" in arch
        else "translation"
    )
    model = (
        ("--decoder-layers", 2) if language else ("--encoder-layers", 1, "--decoder-layers", 2)
    )
    if language:
        criterion = ("--criterion", "cross_entropy", "--tokens-per-sample", 24)
        data = {"data": toy_wiki_data}
    else:
        criterion = TRANSLATION
        data = {}
        model = (*model, "--share-all-embeddings")
    trainer, batches = build_trainer(
        *criterion, *flags, arch=arch, task=task, model=model, **data
    )
    assert language or any(batch["net_input"]["src_tokens"].eq(1).any() for batch in batches)

    def move(trainer, sample, is_dummy):
        return apply_to_sample(torch.Tensor.clone, sample), is_dummy

    def on_host(tokens, of=host_tokens.on_host):
        known = of(tokens)
        assert known is not tokens, "these ids are on the device alone"
        return known

    prepared = [
        host_tokens.remember_token_ids(move, trainer, batch)[0] for batch in batches[:3]
    ]
    monkeypatch.setattr(host_tokens, "on_host", on_host)
    model = trainer.get_model().train()
    for number, batch in enumerate(prepared):
        with host_waits() as places:
            trainer.task.train_step(batch, model, trainer.criterion, trainer.optimizer, number)
    waiting = {place.split(":")[0] for place in places} - NOT_DEVICES
    # NAMOH's heads are as wide as the most tokens that chose one
    assert waiting == ({"head_blocks.py"} if "namoh" in arch else set())


def test_ids_that_were_changed_on_the_device_are_asked_for_again():
    host = torch.tensor([[5, 6, 7], [5, 2, 1]])

    def move(trainer, sample, is_dummy):
        return apply_to_sample(torch.Tensor.clone, sample), is_dummy

    sample = {
        "net_input": {"src_tokens": host, "src_lengths": torch.tensor([3, 2])},
        "target": host,
    }
    moved = host_tokens.remember_token_ids(move, None, sample)[0]["net_input"]["src_tokens"]
    assert host_tokens.on_host(moved) is host and host_tokens.is_padded(moved, 1)
    moved[1, 2] = 2
    assert host_tokens.on_host(moved) is not host and not host_tokens.is_padded(moved, 1)
    dummy = host_tokens.remember_token_ids(lambda *_: (sample, True), None, {})
    assert dummy == (sample, True) and host_tokens.on_host(host) is host


def test_generating_asks_no_layer_whether_the_source_is_padded(build_trainer):
    """A step of a beam search asks as often with three layers as with one."""
    counts = []
    for depth in (1, 3):
        model = ("--encoder-layers", depth, "--decoder-layers", depth, "--share-all-embeddings")
        flags = (*ROUTED, *EVERY, "--label-smoothing", 0.1)
        trainer, batches = build_trainer(
            *flags, arch="moa_transformer_tiny", task="translation", model=model
        )
        models = [trainer.get_model().eval()]
        words = trainer.task.target_dictionary
        generator = SequenceGenerator(models, words, beam_size=2, max_len_a=0, max_len_b=2)
        with torch.no_grad(), host_waits() as places:
            generator.generate(models, batches[0])
        counts.append(
            {p: n for p, n in places.items() if not p.startswith(("sequence_gen", "search"))}
        )
    assert counts[0] == counts[1]


class OnGPU(torch.Tensor):
    """Says that it lies on a GPU; what is computed with it does not."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


def test_whether_padding_is_on_the_right_is_asked_once_for_all_layers(
    build_trainer, monkeypatch
):
    """On a GPU alone, for the flash kernels' causal flag: the CPU's updates above do not ask."""
    flags = (*ROUTED, *EVERY, "--label-smoothing", 0.1)
    sizes = ("--encoder-layers", 1, "--decoder-layers", 3, "--share-all-embeddings")
    trainer, _ = build_trainer(
        *flags, arch="moa_transformer_tiny", task="translation", model=sizes
    )
    model = trainer.get_model()
    told = []
    asked = []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda *_: told.append(current_context().right_padded))
    ask = host_tokens.is_right_padded
    monkeypatch.setattr(
        host_tokens, "is_right_padded", lambda *ids: asked.append(ids) or ask(*ids)
    )
    words = torch.tensor([[2, 7, 8, 9], [2, 7, 1, 1]])
    for target, expected in ((words, True), (words.flip(1), False)):
        model(words, torch.tensor([4, 2]), target.as_subclass(OnGPU))
        assert told == [expected] * 3 and len(asked) == 1
        told.clear(), asked.clear()
    model(words, torch.tensor([4, 2]), words)
    assert told == [False] * 3 and not asked
    with host_waits() as places:
        ask(words, 1)
    assert places.total() == 1, listed(places)


def test_the_counter_sees_what_a_gpu_would_wait_for():
    x = torch.arange(6.0)
    with host_waits() as places:
        bool(x.any()), float(x[0]), x[1].item(), x.tolist(), x[2].tolist()
        x[x > 2], x.cpu(), x.numpy(), x.nonzero(), x.masked_select(x > 1)
    assert places.total() == 10
    with host_waits() as places:
        (
            (x + x).sum(),
            x[2:],
            x.masked_fill(x > 2, 0.0),
            torch.stack([x, x]),
            x[torch.tensor([1, 2])],
        )
    assert places.total() == 0
