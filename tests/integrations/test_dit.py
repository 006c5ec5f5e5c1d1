"""DiT: its sizes, its heads by depth, and where it is the dense model."""

import re
from pathlib import Path

import pytest
import torch

from moa_fairseq.errors import UserError
from moa_fairseq.integrations import dit
from moa_fairseq.integrations.dit import MIXTURES, SIZES, DiT
from moa_fairseq.layers.losses import head_balance_loss

# millions: dense without the fixed positions, 90 %, 75 % of the heads; what the positions add
COUNTS = {
    "S": (32.865, 32.899, 32.900, 0.098),
    "B": (130.316, 130.442, 130.442, 0.197),
    "L": (457.841, 458.250, 458.267, 0.262),
    "XL": (674.835, 675.372, 675.395, 0.295),
}
PRINTED = {
    "S": (33, 33),
    "B": (130, 131),
    "L": (458, 459),
    "XL": (675, 676),
}  # Table 2: dense, MoH


@pytest.mark.parametrize("size", SIZES)
def test_the_parameters_are_those_of_table_2(size):
    """Dense without the fixed table of positions, MoH with it: no one rule gives all printed numbers."""
    dense_count, *counts, positions = COUNTS[size]
    for percent, wanted in ((None, dense_count), (90, counts[0]), (75, counts[1])):
        with torch.device("meta"):
            model = DiT(size, MIXTURES[size, percent] if percent else None)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
        assert round(trained, 3) == wanted
        assert round(model.positions.numel() / 1e6, 3) == positions
        printed = PRINTED[size][percent is not None]
        assert round(trained + positions * (percent is not None)) == printed


@pytest.mark.parametrize("size, percent", MIXTURES)
def test_the_share_of_the_heads(size, percent):
    """The authors round: 88.9 to 90.0 are called 90."""
    rows = [(times, *sizes) for times, sizes in MIXTURES[size, percent]]
    working = sum(times * (shared + chosen) for times, _, shared, chosen in rows)
    every = sum(times * heads for times, heads, _, _ in rows)
    assert sum(times for times, *_ in rows) == SIZES[size][0]
    assert every == SIZES[size][0] * SIZES[size][2]  # as many as in the dense model
    assert percent - 1.2 < 100 * working / every < percent + 0.6


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", (3, 24, 4))

    def build(layers=None, **options):
        torch.manual_seed(0)
        model = DiT("tiny", layers, image_size=4, classes=5, **options).double()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ".router." not in name:
                torch.nn.init.normal_(parameter, std=0.3)
        return model.eval()

    return build


def inputs(batch=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 4, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.tensor([3.0, 500.0, 999.0])[:batch], torch.arange(batch)


BY_DEPTH = [(1, (2, 2, 0)), (1, (4, 2, 1)), (1, (6, 3, 2))]


def test_it_begins_with_nothing(tiny):
    with torch.no_grad():
        assert not DiT("tiny", image_size=4)(torch.randn(2, 4, 4, 4), *inputs(2)[1:]).any()


def test_all_heads_are_the_dense_model(tiny):
    model = tiny()
    moh = tiny([(3, (4, 4, 0))])
    weights = moh.state_dict()
    for name in weights:
        if ".router." in name:
            weights[name].zero_()
        else:
            weights[name].copy_(model.state_dict()[name])
    x = inputs()
    wanted = model(*x)
    assert wanted.shape == (3, 8, 4, 4)
    torch.testing.assert_close(moh(*x), wanted, rtol=0, atol=1e-12)


def test_a_block_is_the_equation(tiny):
    """adaLN-Zero: x + α · Attention(γ-scaled, β-shifted norm), then the same with the feed-forward."""
    block = tiny().blocks[0]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, 24, generator=generator, dtype=torch.float64)
    condition = torch.randn(2, 24, generator=generator, dtype=torch.float64)
    raw = condition * torch.sigmoid(condition) @ block.condition.weight.T + block.condition.bias
    shift, scale, gate, shift_2, scale_2, gate_2 = raw[:, None].chunk(6, 2)

    def norm(rows):
        centred = rows - rows.mean(2, keepdim=True)
        return centred / (centred.square().mean(2, keepdim=True) + 1e-6).sqrt()

    wanted = x + gate * block.attention((1 + scale) * norm(x) + shift)
    wanted = wanted + gate_2 * block.mlp((1 + scale_2) * norm(wanted) + shift_2)
    torch.testing.assert_close(block(x, condition)[0], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("skip", ("never", "always"))
def test_heads_by_depth(tiny, skip):
    """Heads may be wider together than the model, or narrower; a skipped head is one with a gate of 0."""
    model = tiny(BY_DEPTH, moh_skip=skip)
    x = inputs()
    assert [block.attention.q_proj.out_features for block in model.blocks] == [12, 24, 36]
    out, routings = model(*x, with_routing=True)
    assert [routing.probs.shape for routing in routings] == [(12, 2), (12, 4), (12, 6)]
    other = tiny(BY_DEPTH, moh_skip="never")
    torch.testing.assert_close(other(*x), out, rtol=0, atol=1e-12)
    assert model.blocks[2].attention.projection_macs(4, 4)["projections"] == 24 * 6 * 4 * (
        2 * (5 if skip == "always" else 6) + 12
    )
    (out.square().sum() + sum(head_balance_loss(each) for each in routings[1:])).backward()
    assert all(block.attention.router.projection.weight.grad.any() for block in model.blocks)


def test_a_class_is_dropped_in_training_alone(tiny, monkeypatch):
    model = tiny()
    x = inputs()
    monkeypatch.setattr(dit, "CLASS_DROPOUT", 1.0)
    assert not torch.equal(model(*x), model(*x[:2], x[2].flip(0)))
    model.train()
    torch.testing.assert_close(model(*x), model(*x[:2], x[2].flip(0)), rtol=0, atol=0)
    torch.testing.assert_close(
        model(*x), model.eval()(*x[:2], torch.full((3,), 5)), rtol=0, atol=0
    )
    monkeypatch.setattr(dit, "CLASS_DROPOUT", 0.5)
    # Each image has a draw of its own
    images = [each[:1].expand(32, *each.shape[1:]) for each in x]
    outputs = model.train()(*images)
    kept = [torch.allclose(each, outputs[0]) for each in outputs]
    assert 4 < sum(kept) < 28


def test_patches_are_in_their_places(tiny):
    """A change of one corner's pixels, without attention, changes that corner's pixels alone."""
    model, (image, *rest) = tiny(), inputs(1)
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.out_proj.weight)
    other = image.clone()
    other[:, :, :2, 2:] += 1  # the upper right patch
    changed = (model(other, *rest) - model(image, *rest)).abs().amax((0, 1)) > 1e-9
    assert changed.tolist() == [[False, False, True, True]] * 2 + [[False] * 4] * 2


@pytest.mark.parametrize(
    "options",
    (
        {"size": "M"},
        {"layers": [(2, (6, 3, 2))]},
        {"image_size": 5},
        {"layers": [(12, (6, 5, 2))]},
    ),
)
def test_what_does_not_fit_is_refused(options):
    with torch.device("meta"), pytest.raises(UserError):
        DiT(**options)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("images", lambda images, level, classes: (images[..., :2], level, classes)),
        (
            "images",
            lambda images, level, classes: (torch.cat([images, images], 1), level, classes),
        ),
        ("images", lambda images, level, classes: (images[0], level, classes)),
        ("level", lambda images, level, classes: (images, level[0], classes)),
        ("classes", lambda images, level, classes: (images, level, classes[:1])),
        ("classes", lambda images, level, classes: (images, level, classes - 100)),
        ("classes", lambda images, level, classes: (images, level, classes + 100)),
    ],
)
def test_an_input_of_another_shape_or_class_is_named(tiny, name, change):
    with pytest.raises(UserError, match=f"^{name} has "):
        tiny()(*change(*inputs(2)))


def test_the_guide_can_be_followed():
    guide = (Path(__file__).resolve().parents[2] / "docs" / "vision.md").read_text(
        encoding="utf-8"
    )
    (example,) = re.findall(
        r"```python\n(import torch\nfrom moa_fairseq.integrations.dit.*?)```", guide, re.S
    )
    names = {}
    exec(
        example.replace("32, 32", "4, 4").replace("classes=10", "classes=10, image_size=4"),
        names,
    )
    assert names["model"].blocks[0].attention.router.projection.weight.grad.any()
