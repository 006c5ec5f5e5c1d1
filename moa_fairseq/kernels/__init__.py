"""Products with the chosen experts: one function, `project`, and interchangeable backends.

    order = SlotOrder(expert_index, num_experts)        expert_index [N, K]
    slots = project(x, order, weight, into="experts", slots_per_row=K, slots_per_sum=1)

Needs only torch; the backend `triton` needs Triton, too.
"""

from moa_fairseq.kernels.projection import BACKENDS, project, resolve_backend
from moa_fairseq.kernels.routing import top_k_routing, wide_linear
from moa_fairseq.kernels.slot_order import SlotOrder

__all__ = ["BACKENDS", "SlotOrder", "project", "resolve_backend", "top_k_routing", "wide_linear"]
