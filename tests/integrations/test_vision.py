"""timm's vision Transformers as mixtures of heads: dense where all heads work, kept or refused by name."""

import copy
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import timm
except (ImportError, RuntimeError) as error:
    pytest.skip(
        f"bash scripts/test.sh --integrations runs these, in an environment of their own ({error})",
        allow_module_level=True,
    )

import torch
from threads import assert_same_in_threads
from timm.utils import ModelEmaV2, ModelEmaV3
from torch._dynamo.testing import CompileCounter

from moa_fairseq.errors import UserError
from moa_fairseq.integrations.heads import HeadMixture, balance_loss, collect_routings
from moa_fairseq.integrations.vision import to_mixture_of_heads

ROOT = Path(__file__).resolve().parents[2]
HEADS = 8
SIZES = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": HEADS,
    "num_classes": 5,
}
# with a class token, a distillation token, registers; norms of queries; no class token, pooled
KINDS = {
    "vit": ("vit_tiny_patch16_224", {}),
    "deit": ("deit_tiny_distilled_patch16_224", {}),
    "deit3": ("deit3_small_patch16_224", {}),
    "registers": ("vit_small_patch14_reg4_dinov2", {"num_classes": 5}),
    "norms": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "pooled": ("vit_base_patch16_siglip_224", {}),
}
routers = pytest.mark.parametrize("router", ("query-norm", "learned"))
kinds = pytest.mark.parametrize("kind", KINDS)
exact = {"rtol": 0, "atol": 1e-12}


def dense(kind="vit", dtype=torch.float64, **changes):
    """A random model in evaluation mode."""
    torch.manual_seed(0)
    name, sizes = KINDS[kind]
    model = timm.create_model(name, **{**SIZES, **sizes, **changes})
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith("gamma"):  # of a layer's scale, which begins near zero
            torch.nn.init.ones_(parameter)
    return model.to(dtype).eval()


def mixture(kind="vit", router="query-norm", shared_heads=2, active=5, settings=(), **changes):
    """`dense(kind)` as a mixture; the learned router's weights are large enough to matter."""
    options = {"router": router, **dict(settings)}
    model = to_mixture_of_heads(dense(kind, **changes), shared_heads, active, **options)
    for each in mixtures_of(model):
        for weight in each.parameters():
            torch.nn.init.normal_(weight)
    return model.eval()


def mixtures_of(model):
    return [module for module in model.modules() if isinstance(module, HeadMixture)]


def images(dtype=torch.float64):
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=dtype)


@torch.no_grad()
def logits(model):
    return model(images(next(model.parameters()).dtype))


@routers
@kinds
@pytest.mark.parametrize("fused", (True, False))
def test_all_heads_with_neutral_gates_are_the_dense_model(kind, router, fused):
    model = dense(kind)
    for block in model.blocks:
        block.attn.fused_attn = fused
    wanted = logits(model)
    for shared in (2, HEADS):
        moh = to_mixture_of_heads(copy.deepcopy(model), shared, HEADS, router=router)
        for each in mixtures_of(moh):
            for weight in each.parameters():
                torch.nn.init.zeros_(weight)
        torch.testing.assert_close(logits(moh), wanted, **exact)
        assert len(mixtures_of(moh)) == 2 and type(moh) is type(model)
    few = to_mixture_of_heads(model, 2, 4, router=router)
    assert (logits(few) - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ("vit", "norms"))
def test_heads_are_chosen_by_the_norms_of_queries(kind):
    """Of the first third of what qkv computes, before these are normalised; Eq. 4 is in test_decoders.py."""
    model = mixture(kind)
    seen = {}
    attention = model.blocks[0].attn
    attention.qkv.register_forward_hook(lambda module, args, out: seen.update(qkv=out))
    attention.proj.register_forward_pre_hook(
        lambda module, args: seen.update(heads=args[0]), prepend=True
    )
    attention.register_forward_hook(lambda module, args, out: seen.update(out=out))
    logits(model)
    norms = seen["qkv"][..., :32].unflatten(-1, (HEADS, 4)).norm(dim=-1)
    norms[..., :2] = torch.inf
    works = torch.zeros_like(norms).scatter(-1, norms.topk(5).indices, 1.0)
    weights = (attention.proj.weight, attention.proj.bias)
    wanted = torch.nn.functional.linear(
        seen["heads"] * works.repeat_interleave(4, -1), *weights
    )
    torch.testing.assert_close(seen["out"], wanted, **exact)


@routers
def test_a_state_dict_is_read_by_the_same_mixture_alone(router, tmp_path):
    model = mixture("deit", router)
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(model, str(tmp_path / "weights.safetensors"))
    found = to_mixture_of_heads(dense("deit", qkv_bias=True).apply(_blank), 2, 5, router=router)
    safetensors.load_model(found, str(tmp_path / "weights.safetensors"))
    torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=0)
    saved = model.state_dict()
    with pytest.raises(RuntimeError, match=r"mixture\.sizes"):
        dense("deit").load_state_dict(saved)
    with pytest.raises(RuntimeError):
        other = "learned" if router == "query-norm" else "query-norm"
        mixture("deit", other).load_state_dict(saved)
    others = ({"shared_heads": 3}, {"active": 4}, {"settings": {"scaling": "paper"}})
    for changed in others[: 3 if router == "learned" else 2]:
        with pytest.raises(UserError):
            mixture("deit", router, **changed).load_state_dict(saved)


def _blank(module):
    for parameter in module.parameters(recurse=False):
        torch.nn.init.zeros_(parameter)


@pytest.mark.parametrize("kind", (ModelEmaV2, ModelEmaV3))
def test_an_average_of_weights_is_a_mixture(kind):
    """(0.9999 · 11 + 0.0001 · 11) is less than 11 in float32, and 10 as a whole number."""
    model = mixture(shared_heads=1, active=11, num_heads=16)
    average = kind(model, decay=0.9999)
    for _ in range(3):
        average.update(model)
    assert [each.sizes.round().tolist()[:2] for each in mixtures_of(average.module)] == [
        [1, 11]
    ] * 2
    torch.testing.assert_close(logits(average.module), logits(model), rtol=0, atol=1e-5)
    mixture(shared_heads=1, active=11, num_heads=16).load_state_dict(
        average.module.state_dict()
    )


@routers
def test_a_model_of_pickle_is_a_mixture_of_its_own(router):
    model = mixture(router=router)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    other = torch.load(stream, weights_only=False)
    torch.testing.assert_close(logits(other), logits(model), rtol=0, atol=0)
    calls = []
    for each in mixtures_of(other):
        each.router.register_forward_hook(lambda *_: calls.append(1))
    logits(model)
    assert not calls
    logits(other)
    assert len(calls) == 2


def gradients_with_balance(model):
    model.zero_grad()
    with collect_routings(model) as routings:
        out = model(images(next(model.parameters()).dtype))
    (out.square().mean() + balance_loss(routings)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_checkpointing_is_exact_or_refused(monkeypatch):
    model = mixture().train()
    wanted = gradients_with_balance(model)
    model.set_grad_checkpointing()
    torch.testing.assert_close(gradients_with_balance(model), wanted, **exact)
    monkeypatch.setattr("timm.layers.config._REENTRANT_CKPT", True, raising=False)
    monkeypatch.setattr("timm.models._manipulate.use_reentrant_ckpt", lambda: True)
    with pytest.raises(UserError, match="use_reentrant"):
        gradients_with_balance(model)


def test_autocast_and_half_precision():
    model = mixture(router="learned", dtype=torch.float32).train()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(grad.isfinite().all() for grad in gradients_with_balance(model))
    assert logits(model.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("target", ("qkv", "proj"))
def test_an_adapter_is_the_same_merged_or_not(target):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=[target], init_lora_weights=False, lora_alpha=64)
    model = peft.get_peft_model(mixture(), settings).eval()
    apart = logits(model)
    assert (apart - logits(mixture())).abs().max() > 1e-2
    torch.testing.assert_close(logits(model.merge_and_unload()), apart, rtol=0, atol=1e-5)


def test_passes_in_threads_are_those_of_one():
    model = mixture("deit")

    @torch.no_grad()
    def run(number):
        return model(images()[: 1 + number % 3] + number)

    assert_same_in_threads(run)


def test_routings_are_there_after_the_block_without_gradients_too():
    model = to_mixture_of_heads(timm.create_model("vit_tiny_patch16_224", depth=1).eval(), 1, 2)
    with collect_routings(model) as routings, torch.no_grad():
        model(torch.randn(1, 3, 224, 224))
        with pytest.raises(UserError, match="end first"):
            balance_loss(routings)
    (routing,) = routings
    assert routing.expert_ids.shape == (197, 2) and (routing.expert_ids[:, 0] == 0).all()


@pytest.mark.parametrize("part", ("whole", "blocks"))
def test_compiled(part):
    """One graph; converted after a compiled call, too, whose graph would leave the hooks out."""
    torch._dynamo.reset()
    wanted = logits(mixture())
    model = dense()
    called = torch.compile(model, fullgraph=True, backend="eager") if part == "whole" else model
    if part == "blocks":
        for block in model.blocks:
            block.compile(fullgraph=True, backend="eager")
    assert (logits(called) - wanted).abs().max() > 1e-3
    to_mixture_of_heads(model, 2, 5).load_state_dict(mixture().state_dict())
    torch.testing.assert_close(logits(called), wanted, **exact)


@pytest.mark.parametrize("part", ("whole", "blocks"))
def test_compiled_once_for_all_passes_of_a_block(part):
    """A list that grows would be compiled anew for each length."""
    torch._dynamo.reset()
    model = mixture(router="learned").train()
    counter = CompileCounter()
    passes = [images() + shift for shift in range(4)]
    with collect_routings(model) as wanted:
        for x in passes:
            model(x)
    compiled = {"fullgraph": True, "backend": counter}
    called = torch.compile(model, **compiled) if part == "whole" else model
    if part == "blocks":
        for block in model.blocks:
            block.compile(**compiled)
    frames = []
    for _ in range(2):
        with collect_routings(model) as found:
            for x in passes:
                called(x)
                frames.append(counter.frame_count)
        assert len(found) == len(wanted) == 8
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one.probs, other.probs, **exact)
    assert frames == [1] * 8  # the blocks have one, too
    balance_loss(found).backward()
    assert all(each.router.projection.weight.grad.norm() > 0 for each in mixtures_of(model))


def test_stages_may_have_numbers_of_their_own():
    """PiT has 2, 4 and 8 heads by depth."""
    torch.manual_seed(0)
    model = timm.create_model("pit_ti_224", img_size=64).eval()
    x = torch.randn(1, 3, 64, 64)
    layers = [None] * 2 + [(2, 4)] * 6 + [(2, 5)] * 4
    with torch.no_grad():
        before = model(x)
        moh = to_mixture_of_heads(model, layers=layers)
        assert (moh(x) - before).abs().max() > 1e-4
    assert [each.sizes.tolist()[:2] for each in mixtures_of(moh)] == [[2, 4]] * 6 + [[2, 5]] * 4


REFUSED = {
    "Swin": ("swin_tiny_patch4_window7_224", {}, "WindowAttention"),
    "BEiT, whose attention has the same name": (
        "beit_base_patch16_224",
        {},
        r"beit\.Attention",
    ),
    "parallel blocks": ("vit_base_patch16_xp_224", {}, "no attention of its own"),
    "no attention": ("resnet18", {}, "no attention of its own"),
    "a norm of all heads": ("vit_tiny_patch16_224", {}, "norm", {"scale_attn_norm": True}),
    "balance": ("vit_tiny_patch16_224", {"balance": 0.1}, "balance=0.1.*balance_loss"),
    "queries": ("vit_tiny_patch16_224", {"queries": "q"}, "queries='q'"),
    "output": ("vit_tiny_patch16_224", {"output": "proj"}, "output='proj'"),
    "scaling": ("vit_tiny_patch16_224", {"scaling": "paper"}, "scaling='paper'"),
    "too few layers": (
        "vit_tiny_patch16_224",
        {"shared_heads": None, "active": None, "layers": [(1, 2)]},
        "12 entries",
    ),
    "unknown": ("vit_tiny_patch16_224", {"heads": 2}, "heads"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_one_is_refused_and_unchanged(reason):
    name, settings, why, *changes = REFUSED[reason]
    with torch.device("meta"):
        model = timm.create_model(name, **dict(*changes))
    modules = [*model.modules()]
    with pytest.raises(UserError, match=why):
        to_mixture_of_heads(model, **{"shared_heads": 1, "active": 2, **settings})
    assert [*model.modules()] == modules and not any(
        each._forward_pre_hooks for each in modules
    )


def test_a_mixture_is_not_converted_again():
    with pytest.raises(UserError, match="already"):
        to_mixture_of_heads(mixture(), 2, 5)


def test_another_torchs_torchvision_is_said(tmp_path):
    (tmp_path / "torchvision.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    program = (
        "from moa_fairseq.errors import UserError\n"
        "try:\n import moa_fairseq.integrations.vision\n"
        "except UserError as error:\n assert 'torchvision::nms' in str(error)\n"
        "else:\n raise SystemExit('imported')"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_guide_can_be_followed(tmp_path, monkeypatch):
    guide = (ROOT / "docs" / "vision.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(import timm.*?)```", guide, re.S)
    monkeypatch.chdir(tmp_path)
    batches = [(torch.randn(2, 3, 224, 224), torch.tensor([0, 1]))]
    names = {"loader": batches}
    thin = example.replace('_224"', '_224", depth=2').replace(
        "pretrained=True", "pretrained=False"
    )
    exec(thin, names)
    assert [each.sizes.tolist()[:2] for each in mixtures_of(names["model"])] == [[3, 4]] * 2


def test_torch_fx_takes_attentions_as_leaves():
    """Of what it cannot trace it says what to do."""
    create = pytest.importorskip(
        "torchvision.models.feature_extraction"
    ).create_feature_extractor
    model = mixture("vit", "learned")
    with pytest.raises(UserError, match=r"'leaf_modules': \[Attention\]"):
        create(model, ["blocks.1"])
    features = create(
        model, ["blocks.1"], tracer_kwargs={"leaf_modules": [type(model.blocks[0].attn)]}
    )
    seen = []
    model.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out))
    logits(model)
    with torch.no_grad():
        torch.testing.assert_close(features(images())["blocks.1"], seen[0], **exact)
