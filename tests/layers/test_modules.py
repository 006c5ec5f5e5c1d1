"""Attentions as modules: copies, names, collectors, retained dropout, padding that is declared."""

import copy
import pickle

import pytest
import torch
from fairseq.modules.fairseq_dropout import FairseqDropout
from time_first import MixtureOfAttention, MixtureOfAttentiveExperts

from moa_fairseq.layers.expert_draw import ExpertDraw
from moa_fairseq.layers.initialization import scale_branch
from moa_fairseq.plugin.forward_context import collect_routings, forward_context

WIDTH = 16


def moa(**role):
    return MixtureOfAttention(WIDTH, num_experts=4, experts_per_token=2, expert_dim=8, **role)


def mae(**role):
    return MixtureOfAttentiveExperts(WIDTH, num_heads=4, causal=True, **role)


@pytest.fixture(params=[moa, mae], ids=["moa", "mae"])
def build(request):
    torch.manual_seed(0)
    return lambda **role: request.param(**role).eval()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies_remember_their_own_keys(build, copied):
    """Layers are often made as copies of one: they must not write into the same cache."""
    first = build(self_attention=True)
    second = copied(first)
    x = torch.randn(4, 2, WIDTH)
    expected, _ = second(x, x, x, attn_mask=torch.full((4, 4), -torch.inf).triu(1))
    state = {}
    steps = []
    for step in x.split(1):
        first(-step, None, None, incremental_state=state)
        steps.append(second(step, step, step, incremental_state=state)[0])
    torch.testing.assert_close(torch.cat(steps), expected)


def test_a_copy_without_a_path_has_a_name_of_its_own_and_one_with_a_path_keeps_it(build):
    attention = build(self_attention=True)
    assert copy.deepcopy(attention).name != attention.name
    attention.name = "decoder.layers.0.self_attn"
    assert copy.deepcopy(attention).name == "decoder.layers.0.self_attn"


def test_nested_collectors_all_hear():
    module = moa(self_attention=True)
    x = torch.randn(2, 1, WIDTH)
    with collect_routings() as outer:
        module(x, x, x)
        with collect_routings() as inner:
            module(x, x, x)
        module(x, x, x)
    module(x, x, x)
    assert (len(outer), len(inner)) == (3, 1)
    assert outer[1][1] is inner[0][1]


def test_unnamed_attentions_have_names_and_draws_of_their_own():
    modules = [MixtureOfAttentiveExperts(8, 8, self_attention=True).train() for _ in range(2)]
    assert modules[0].name != modules[1].name
    x = torch.randn(3, 64, 8)
    draw = ExpertDraw(torch.arange(64), seed=1, update=1)
    with forward_context(draw=draw), collect_routings() as decisions:
        for module in modules:
            module(x, x, x)
    one, other = (decision.expert_ids for _, decision in decisions)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_retained_dropout_reaches_the_weights_of_attention(retained, need_weights):
    """fairseq's --retain-dropout: a module says that it drops out in evaluation, too."""
    dropout = FairseqDropout(0.5, module_name="MixtureOfAttention")
    dropout.apply_during_inference = retained
    attention = moa(self_attention=True, dropout=dropout).eval()
    x = torch.randn(6, 2, WIDTH)
    first, second = (attention(x, x, x, need_weights=need_weights)[0] for _ in range(2))
    assert torch.equal(first, second) != retained


def test_the_padding_that_is_declared_comes_before_that_of_the_keys():
    """What the caller gives counts first, then what is declared, then the keys' own padding."""
    given, declared, of_keys = (torch.arange(4) >= torch.tensor([[n], [4]]) for n in (1, 2, 3))
    attention = moa(self_attention=True)
    x = torch.randn(4, 2, WIDTH)
    for words, expected in (({"query_padding_mask": given}, given), ({}, declared)):
        with forward_context(padding=declared), collect_routings() as decisions:
            attention(x, x, x, key_padding_mask=of_keys, **words)
        assert torch.equal(decisions[0][1].padding, expected.reshape(-1))


def test_the_scale_of_a_branch_is_that_of_its_bias_too():
    attention = moa(self_attention=True, expert_bias=True).eval()
    for parameter in attention.out_experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 2, WIDTH)
    before = attention(x, x, x)[0]
    scale_branch(attention, 0.25)
    torch.testing.assert_close(attention(x, x, x)[0], 0.25 * before)
