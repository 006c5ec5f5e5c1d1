"""Heads that take turns: tokens with an even number use the first half of the heads, the others the rest."""

import dataclasses

import torch
from torch import nn

from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.settings import FamilySettings, flag


@dataclasses.dataclass
class ParitySettings(FamilySettings):
    parity_scale: float = flag(2.0, "gate of the heads that work")


class ParityAttention(Attention):
    def __init__(self, embed_dim, num_heads, settings=None, kdim=None, vdim=None, **options):
        self.scale = ParitySettings.of(settings, options).parity_scale
        super().__init__(embed_dim, num_heads, embed_dim // num_heads, **options)
        self.q_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(2))
        self.k_proj, self.v_proj = (
            nn.Linear(size or embed_dim, embed_dim) for size in (kdim, vdim)
        )

    @classmethod
    def from_settings(cls, embed_dim, settings, *, num_heads, causal, **options):
        return cls(embed_dim, num_heads, settings, **options)

    def compute(self, call):
        routing = self.route(call)
        k = v = None  # where the cache has them
        if call.memory is not None:
            k = self.split(self.k_proj(call.memory))
            v = self.split(self.v_proj(call.values))
        heads, weights = self.attend(call, self.split(self.q_proj(call.x)), k, v)
        gates = torch.zeros_like(routing.probs, dtype=heads.dtype)
        gates = gates.scatter_(1, routing.expert_ids, routing.gates.to(heads.dtype))
        # [B, T, H, D]
        heads = heads.transpose(1, 2) * gates.view(*call.x.shape[:2], self.num_heads, 1)
        return self.out_proj(heads.flatten(2)), weights, (routing,)

    def route(self, call):
        batch, length, _ = call.x.shape
        before = torch.zeros(batch, 1, device=call.x.device)
        if call.cache is not None:
            before = call.cache.sums.get("steps", before)
            call.cache.sums["steps"] = before + length
        position = before + torch.arange(length, device=call.x.device)
        half = self.num_heads // 2
        index = (position.reshape(-1, 1) % 2).long() * half + torch.arange(
            half, device=call.x.device
        )
        probs = torch.zeros(index.size(0), self.num_heads, device=call.x.device).scatter_(
            1, index, 1 / half
        )
        gates = torch.full_like(index, self.scale, dtype=torch.float32)
        padding = None if call.query_padding is None else call.query_padding.reshape(-1)
        return Routing(index, gates, probs, probs, self.num_heads, padding=padding)

    def projection_macs(self, queries, keys):
        sides = self.k_proj.in_features + self.v_proj.in_features
        return {
            "router": 0,
            "projections": 2 * queries * self.embed_dim**2 + keys * sides * self.embed_dim,
        }

    def split(self, x):
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)


ParitySettings.attention = ParityAttention
