"""Which expert stands for a mixture in evaluation."""

import torch

from moa_fairseq.attention.single_expert import random_expert, single_expert

NAMES = [f"decoder.layers.{layer}.{kind}_attn" for layer in range(40) for kind in ("self", "encoder")]


def test_the_top_expert_is_each_gates_own():
    probs = torch.tensor([[[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]]])
    assert single_expert("top-expert", probs, "a", 1).tolist() == [[1, 0]]


def test_a_random_expert_is_one_for_the_whole_module_whatever_the_gate():
    probs = torch.rand(5, 4, 28)
    for name in NAMES[:5]:
        chosen = single_expert("random-expert", probs, name, 2)
        assert chosen.shape == (5, 4) and chosen.unique().tolist() == [random_expert(name, 2, 28)]


def test_draws_differ_between_modules_and_seeds_and_are_fair():
    draws = [[random_expert(name, seed, 8) for name in NAMES] for seed in range(40)]
    counts = torch.tensor(draws).flatten().bincount(minlength=8).double()
    expected = len(NAMES) * 40 / 8
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001
    assert len({tuple(draw) for draw in draws}) == 40
    assert [random_expert(name, 3, 8) for name in NAMES] == draws[3]
