"""Heads that take turns: tokens with an even number use the first half of the heads, the others the rest."""

import dataclasses

import torch
from torch import nn

from moa_fairseq.attention.base import FamilySettings, MixtureAttention
from moa_fairseq.attention.routing import Routing


@dataclasses.dataclass
class ParitySettings(FamilySettings):
    parity_scale: float = dataclasses.field(default=2.0, metadata={"help": "gate of the heads that work"})

    def build(self, embed_dim, num_heads, causal, **role):
        return ParityAttention(embed_dim, num_heads, self.parity_scale, **role)


class ParityAttention(MixtureAttention):
    def __init__(self, embed_dim, num_heads, scale, kdim=None, vdim=None, **role):
        super().__init__(embed_dim, num_heads, embed_dim // num_heads, **role)
        self.scale = scale
        self.q_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(size or embed_dim, embed_dim) for size in (kdim, vdim))

    def route(self, x, padding, cache):
        steps = (
            torch.zeros(x.size(0), 1, device=x.device)
            if cache is None
            else cache.setdefault("steps", torch.zeros(x.size(0), 1, device=x.device))
        )
        position = steps + torch.arange(x.size(1), device=x.device)
        if cache is not None:
            cache["steps"] = steps + x.size(1)
        half = self.num_heads // 2
        index = (position.reshape(-1, 1) % 2).long() * half + torch.arange(half, device=x.device)
        probs = torch.zeros(index.size(0), self.num_heads, device=x.device).scatter_(1, index, 1 / half)
        gate = torch.full_like(index, self.scale, dtype=x.dtype)
        mask = None if padding is None else padding.reshape(-1)
        return Routing(index, gate, probs, probs, self.num_heads, padding_mask=mask)

    def project_queries(self, x, decision):
        return self._split(self.q_proj(x))

    def project_keys_values(self, key, value, source):
        return self._split(self.k_proj(key)), self._split(self.v_proj(value))

    def project_output(self, heads, decision):
        batch, _, tgt_len, _ = heads.shape
        weight = torch.zeros_like(decision.probs, dtype=heads.dtype).scatter_(
            1, decision.expert_ids, decision.gates
        )
        heads = heads.transpose(1, 2) * weight.view(batch, tgt_len, self.num_heads, 1)
        return self.out_proj(heads.reshape(batch, tgt_len, self.embed_dim))

    def projection_macs(self, queries, keys):
        sides = self.k_proj.in_features + self.v_proj.in_features
        return {"router": 0, "projections": 2 * queries * self.embed_dim**2 + keys * sides * self.embed_dim}

    def _split(self, x):
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
