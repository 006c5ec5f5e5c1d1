"""Every attention with fairseq's call, time first, under its own name."""

from moa_fairseq import layers as attention
from moa_fairseq.plugin.fairseq_call import with_fairseq_call

DenseAttention = with_fairseq_call(attention.DenseAttention)
GroupedQueryExperts = with_fairseq_call(attention.GroupedQueryExperts)
LatentAttention = with_fairseq_call(attention.LatentAttention)
MixtureOfAttention = with_fairseq_call(attention.MixtureOfAttention)
MixtureOfAttentiveExperts = with_fairseq_call(attention.MixtureOfAttentiveExperts)
MixtureOfHeads = with_fairseq_call(attention.MixtureOfHeads)
NativeMixtureOfHeads = with_fairseq_call(attention.NativeMixtureOfHeads)
SwitchHeadAttention = with_fairseq_call(attention.SwitchHeadAttention)
