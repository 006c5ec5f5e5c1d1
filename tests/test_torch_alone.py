"""The attention and the kernels where fairseq cannot be imported."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys
for name in ("fairseq", "omegaconf", "hydra"):
    sys.modules[name] = None  # as if they were not installed
import torch
from moa_fairseq.transformer.forward_context import collect_routings
from moa_fairseq.attention.expert_draw import ExpertDraw
from moa_fairseq.transformer.forward_context import forward_context
from moa_fairseq.attention.losses import load_balance_loss
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.moa import MixtureOfAttention
from moa_fairseq.attention.moh import MixtureOfHeads
from moa_fairseq.attention.switchhead import SwitchHeadAttention
from moa_fairseq.feed_forward.sigma_moe import SigmaMoE
from moa_fairseq.kernels import SlotOrder, project

torch.manual_seed(0)
x = torch.randn(6, 2, 16, requires_grad=True)
for attention in (
    MixtureOfAttention(16, num_experts=4, experts_per_token=2, expert_dim=8, self_attention=True),
    MixtureOfAttentiveExperts(16, 4, self_attention=True, causal=True),
    SwitchHeadAttention(16, 2, 8, num_experts=3, experts_per_token=2, self_attention=True, positions="xl"),
    MixtureOfHeads(16, 4, shared_heads=1, routed_per_token=2, skip="always", self_attention=True),
):
    with collect_routings() as decisions, forward_context(draw=ExpertDraw(torch.arange(2), 1, 1)):
        out, _ = attention(x, x, x, need_weights=False)
    (out.square().sum() + load_balance_loss(decisions[0][1])).backward()
    state = {}
    attention.eval()
    steps = [attention(x[t : t + 1], None, None, incremental_state=state)[0] for t in range(6)]
    future = torch.triu(torch.full((6, 6), float("-inf")), 1)
    torch.testing.assert_close(torch.cat(steps), attention(x, x, x, attn_mask=future)[0])
assert SigmaMoE(16, 4, 2, 8)(x).shape == x.shape
order = SlotOrder(torch.tensor([[0, 2], [1, 2]]), 3)
out = project(torch.ones(2, 8), order, torch.ones(3, 4, 8), into="experts", slots_per_row=2, slots_per_sum=1)
assert out.shape == (4, 4) and (out == 8).all()
print("done with", *sorted({n.split(".")[1] for n in sys.modules if n.startswith("moa_fairseq.")}))
"""


def test_attention_and_kernels_work_with_torch_alone():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done with attention errors feed_forward files kernels torch_compat"


IMPORTS = """
import logging, os, sys
import torch
def state():
    root = logging.getLogger()
    return sys.excepthook, root.level, root.handlers[:], dict(os.environ), torch.get_num_threads()
before, modules = state(), set(sys.modules)
import moa_fairseq.attention.mae, moa_fairseq.attention.moa, moa_fairseq.attention.moh
import moa_fairseq.attention.switchhead, moa_fairseq.feed_forward.sigma_moe
assert state() == before
print(*sorted({name.split(".")[0] for name in set(sys.modules) - modules}))
import moa_fairseq
moa_fairseq.register()
from fairseq.models import ARCH_MODEL_REGISTRY
assert "moa_transformer_base" in ARCH_MODEL_REGISTRY
"""


def test_importing_the_attention_changes_nothing_where_fairseq_is_installed():
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["moa_fairseq"]
