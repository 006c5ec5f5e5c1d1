"""Products with the selected experts: one function, `project`, and interchangeable ways to compute it.

    order = ExpertPermutation(expert_ids, num_experts)            expert_ids [N, K]
    slots = project(x, weight, order, is_up=True)         x [N, C], weight [E, D, C] → [N·K, D]

Needs only torch; the backend `triton` needs Triton, too.
"""

from moa_fairseq.layers.experts.expert_permutation import ExpertPermutation
from moa_fairseq.layers.experts.projection import BACKENDS, project, resolve_backend
from moa_fairseq.layers.experts.routing import top_k_routing, wide_product

__all__ = [
    "BACKENDS",
    "ExpertPermutation",
    "project",
    "resolve_backend",
    "top_k_routing",
    "wide_product",
]
