"""fairseq's models that several threads and asyncio tasks call at the same time."""

import asyncio
import itertools

import pytest
import torch
import whole_models
from fairseq.sequence_generator import SequenceGenerator
from threads import THREADS, assert_same_in_threads

from moa_fairseq.plugin.admin import Shortcut
from moa_fairseq.plugin.forward_context import collect_routings

SMALL = ("--encoder-layers", 2, "--decoder-layers", 2, "--share-all-embeddings")
MIXTURES = [
    f"{name}_transformer_tiny" for name in ("moa", "mae", "switchhead", "moh", "gqe", "namoh")
]


def build(arch, *flags):
    return whole_models.build(arch, *SMALL, *flags).double().eval()


def inputs(number):
    """A batch of a size of its own; padded, if it has two sentences or more."""
    g = torch.Generator().manual_seed(number)
    rows = 1 + number % 3
    source = 6 + number
    target = 5 + number % 4
    tokens = torch.randint(4, whole_models.SYMBOLS, (rows, source), generator=g)
    before = torch.randint(4, whole_models.SYMBOLS, (rows, target), generator=g)
    if rows > 1:
        tokens[0, -2:] = before[0, -2:] = whole_models.PAD
    return {
        "src_tokens": tokens,
        "src_lengths": tokens.ne(whole_models.PAD).sum(1),
        "prev_output_tokens": before,
    }


@pytest.mark.parametrize("arch", MIXTURES)
def test_passes_and_routings_are_those_of_one(arch):
    model = build(arch)

    @torch.no_grad()
    def run(number):
        with collect_routings() as routings:
            out, _ = model(**inputs(number))
        return [out, *(routing.probs for _, routing in routings)]

    assert_same_in_threads(run)
    assert model.decoder.cross_self_attention is False


@pytest.mark.parametrize("arch", ["mae_transformer_tiny", "namoh_transformer_tiny"])
def test_searches_are_those_of_one(arch):
    model = build(arch)

    @torch.no_grad()
    def run(number):
        search = SequenceGenerator(
            [model], whole_models.dictionary(), beam_size=1 + number % 3, max_len_b=5
        )
        batch = inputs(number)
        del batch["prev_output_tokens"]
        found = search.generate([model], {"net_input": batch})
        return [each[name] for each in itertools.chain(*found) for name in ("tokens", "score")]

    assert_same_in_threads(run, 1)


def test_residual_sums_of_admin_have_the_omega_of_their_place():
    model = build("dense_transformer_tiny", "--initialization", "admin")
    shortcuts = [module for module in model.modules() if isinstance(module, Shortcut)]
    for place, shortcut in enumerate(shortcuts):
        shortcut.omega.data.fill_(1 + 0.1 * place)

    @torch.no_grad()
    def run(number):
        return [model(**inputs(number))[0]]

    assert_same_in_threads(run)


def test_gradients_with_checkpoints_are_those_of_one():
    model = build("moa_transformer_tiny", "--checkpoint-activations", "--dropout", 0)
    model.train()
    weights = list(model.parameters())

    def run(number):
        with collect_routings() as routings:
            loss = model(**inputs(number))[0].square().mean()
        loss = loss + sum(routing.probs.square().mean() for _, routing in routings)
        return list(
            torch.autograd.grad(loss, weights, materialize_grads=True, allow_unused=True)
        )

    assert_same_in_threads(run, 1)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_block_has_the_passes_of_its_own_task(elsewhere):
    model = build("moa_transformer_tiny")

    @torch.no_grad()
    def run(number):
        model(**inputs(number))

    async def task(number):
        with collect_routings() as routings:
            for _ in range(3):
                if elsewhere:
                    await asyncio.to_thread(run, number)
                else:
                    run(number)
                    await asyncio.sleep(0.001 * (number % 3))
        sizes = {
            routing.probs.size(0) for name, routing in routings if name.startswith("encoder")
        }
        assert len(routings) == 18 and sizes == {inputs(number)["src_tokens"].numel()}
        return routings

    async def together():
        return await asyncio.gather(*map(task, range(THREADS)))

    found = asyncio.run(together())
    run(0)
    assert [len(routings) for routings in found] == [18] * THREADS  # no block is left open


def test_texts_of_several_parts_are_read_in_threads():
    model = whole_models.build("switchhead_lm_47m", "--decoder-layers", 2).double().eval()
    model.decoder.carry_context(1)
    texts = [inputs(number)["src_tokens"][:1, :6] for number in range(THREADS)]

    @torch.no_grad()
    def run(number):
        chunks = texts[number].split(2, 1)
        return [
            model.decoder(each, chunk=place, part=number)[0]
            for place, each in enumerate(chunks)
        ]

    with torch.no_grad():
        whole, _ = model.decoder(texts[0])
    torch.testing.assert_close(run(0)[1], whole[:, 2:4])  # it has read the first chunk
    assert_same_in_threads(run, 1)
