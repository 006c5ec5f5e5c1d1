"""The attention and the kernels where fairseq cannot be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
for name in ("fairseq", "omegaconf", "hydra"):
    sys.modules[name] = None  # as if they were not installed
import torch
from moa_fairseq.layers.expert_draw import ExpertDraw
from moa_fairseq.layers.gqe import GroupedQueryExperts
from moa_fairseq.layers.family_losses import losses_for
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.moa import MixtureOfAttention
from moa_fairseq.layers.moh import MixtureOfHeads
from moa_fairseq.layers.namoh import NativeMixtureOfHeads
from moa_fairseq.layers.switchhead import SwitchHeadAttention
from moa_fairseq.layers.sigma_moe import SigmaMoE, SigmaMoESettings
from moa_fairseq.layers.experts import ExpertPermutation, project

torch.manual_seed(0)
x = torch.randn(2, 6, 16, requires_grad=True)
experts = dict(num_experts=4, experts_per_token=2, expert_dim=8, self_attention=True)
for attention, inputs in (
    (MixtureOfAttention(16, **experts), {}),
    (
        MixtureOfAttentiveExperts(16, 4, self_attention=True, causal=True),
        {"draw": ExpertDraw(torch.arange(2), 1, 1)},
    ),
    (SwitchHeadAttention(16, switchhead_heads=2, **experts, positions="xl"), {}),
    (
        MixtureOfHeads(
            16, 4, moh_shared_heads=1, experts_per_token=2, moh_skip="always", self_attention=True
        ),
        {},
    ),
    (GroupedQueryExperts(16, gqe_groups=2, **experts), {}),
    (NativeMixtureOfHeads(16, **experts), {}),
):
    out, routings = attention(x, causal=True, with_routing=True, **inputs)
    (out.square().sum() + losses_for(attention)(routings)).backward()
    cache = attention.eval().new_cache()
    steps = [attention(x[:, t : t + 1], cache=cache) for t in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), attention(x, causal=True))
settings = SigmaMoESettings(sigma_moe_num_experts=4, sigma_moe_experts_per_token=2, sigma_moe_expert_dim=8)
assert SigmaMoE(16, settings)(x).shape == x.shape
order = ExpertPermutation(torch.tensor([[0, 2], [1, 2]]), 3)
out = project(torch.ones(2, 8), order=order, weight=torch.ones(3, 4, 8), is_up=True)
assert out.shape == (4, 4) and (out == 8).all()
print("done with", *sorted({n.split(".")[1] for n in sys.modules if n.startswith("moa_fairseq.")}))
"""


def test_attention_and_kernels_work_with_torch_alone():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done with errors files layers"


IMPORTS = """
import logging, os, sys
import torch
def state():
    root = logging.getLogger()
    return sys.excepthook, root.level, root.handlers[:], dict(os.environ), torch.get_num_threads()
before, modules = state(), set(sys.modules)
import moa_fairseq.layers.mae, moa_fairseq.layers.moa, moa_fairseq.layers.moh
import moa_fairseq.layers.switchhead, moa_fairseq.layers.sigma_moe
assert state() == before
print(*sorted({name.split(".")[0] for name in set(sys.modules) - modules}))
import moa_fairseq
moa_fairseq.register()
from fairseq.models import ARCH_MODEL_REGISTRY
assert "moa_transformer_base" in ARCH_MODEL_REGISTRY
"""


@pytest.mark.thorough
def test_importing_the_attention_changes_nothing_where_fairseq_is_installed():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["moa_fairseq"]
