"""A router's selection for a batch of tokens, and the sums of it that losses and statistics need."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from moa_fairseq.layers.experts import ExpertPermutation
from moa_fairseq.layers.experts.twice import differentiable_gradients
from moa_fairseq.layers.torch_compat import full_precision


@dataclass(frozen=True)
class Routing:
    """The experts selected for N = B·T tokens (batch first) or N = B sequences, with their probabilities.

    Args:
        expert_ids: the selected experts (MoA Eq. 8), [N, K] int64; if K = E, every row is 0 … E − 1.
        gates: the weights of the selected experts (MoA Eq. 9), [N, K] float32; zero at padding.
        probs: routing probabilities (MoA Eq. 7), [N, E] float32.
        logits: the router's outputs before the softmax, [N, E] float32.
        num_experts: E, the number of experts of all groups.
        groups: the number of equal groups of experts, which are routed independently (SwitchHead: one for
            each head); the slots, too, are in equal groups, and those of group g have experts of group g.
        shared: the number of experts that are always selected (MoH). They are the first experts, in the first
            slots, and losses and statistics leave them out.
        side: "queries", or "keys" if the tokens are those of keys and values.
        scope: "tokens", or "sequences" if a sequence is routed as a whole.
        padding: [N] bool, True = padding; None: no padding.
        auxiliary: whether auxiliary losses may be computed; if not (SwitchHead's attention), the routing is
            only for statistics.
        straight_through: whether the gates of unselected experts, which are zero, have the gradients of their
            probabilities (MoH Eq. 10).
        family: the `Attention.family` of the layer, which losses check; None: they check nothing.
    """

    expert_ids: Tensor
    gates: Tensor
    probs: Tensor
    logits: Tensor
    num_experts: int
    groups: int = 1
    shared: int = 0
    side: str = "queries"
    scope: str = "tokens"
    padding: Tensor | None = None
    auxiliary: bool = True
    straight_through: bool = False
    family: str | None = None

    def __getitem__(self, index: int) -> Tensor:
        """Item 0, the gates, which torch's backward hooks (fairseq's search for NaN) take from an output."""
        return (self.gates,)[index]

    def order(self) -> ExpertPermutation:
        """The permutation of the slots into the order of experts, which is sorted on first use."""
        chooses_all = self.expert_ids.size(1) == self.num_experts
        return ExpertPermutation(self.expert_ids, self.num_experts, chooses_all)

    @property
    def chooses_all(self) -> bool:
        """Whether K = E: slot k is expert k, so nothing needs sorting."""
        return self.expert_ids.size(1) == self.num_experts

    @property
    def gates_by_expert(self) -> Tensor:
        """The gates of all experts, zero for unselected experts, [N, E]."""
        if self.straight_through:
            zeros = self.probs - self.probs.detach()
            if self.padding is not None:
                zeros = zeros.masked_fill(self.padding.unsqueeze(1), 0.0)
        else:
            zeros = torch.zeros_like(self.probs)
        return zeros.scatter(1, self.expert_ids, self.gates)

    @property
    def expert_counts(self) -> Tensor:
        """f_i of MoA Eq. 14: the number of real tokens that selected each routed expert, [E − shared]."""
        real = _real_tokens([self], self.padding)
        if self.chooses_all:
            return real.sum().repeat(self.num_experts - self.shared)
        with full_precision(real.device.type):
            return real @ _choices([self])


torch.export.register_dataclass(Routing)


class Sums(NamedTuple):
    """Sums over the real tokens of M routings with E experts."""

    counts: Tensor  # the number of tokens that selected each expert (f of MoA Eq. 14), [M, E]; no gradient
    summed_probability: Tensor  # sums of the probabilities (P of MoA Eq. 15), [M, E]
    squared_lse: Tensor  # sums of (log Σ_i exp x_i)², averaged over the groups of a token, [M]
    tokens: Tensor  # the number of tokens that are not padding, [M]


class RoutingSums:
    """Sums over the real tokens of M routings, from which losses and statistics are computed.

    The routings have the same family, auxiliary flag and numbers of experts, slots, groups and shared experts
    (see `by_kind`), but may have different numbers of tokens. Their rows are processed together, so that a
    GPU starts as many kernels for 18 routers as for one. Here E is the number of routed experts, without
    shared ones, and G the number of groups. Row m of every sum belongs to decisions[order[m]].

    Args:
        decisions: M routings, at least one.
    """

    def __init__(self, decisions: Sequence[Routing]):
        places: dict[int, list[int]] = defaultdict(list)
        for place, decision in enumerate(decisions):
            places[decision.probs.size(0)].append(place)
        self.order = [place for indices in places.values() for place in indices]
        self.groups = decisions[0].groups
        self.auxiliary = decisions[0].auxiliary
        self.family = decisions[0].family
        self._decisions = [decisions[place] for place in self.order]
        # (decisions, tokens of each)
        self._runs = [(len(indices), tokens) for tokens, indices in places.items()]
        self._padding = self._joint_padding()
        self._real = _real_tokens(self._decisions, self._padding)
        # no cached_property: torch.compile cannot enter its lock
        self._sums: Sums | None = None
        self._load: Tensor | None = None

    @classmethod
    def by_kind(cls, decisions: Sequence[Routing]) -> list["RoutingSums"]:
        """Sums of routings of several kinds, one object for each kind.

        Args:
            decisions: routings of any sizes, in any order.

        Returns:
            The sums of each kind; the indices in their `order` are those in `decisions`.
        """
        kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for place, d in enumerate(decisions):
            sizes = (d.probs.size(1), d.expert_ids.size(1), d.groups, d.shared)
            kind = (*sizes, d.probs.dtype, d.auxiliary, d.family)
            kinds[kind].append(place)
        result = []
        for places in kinds.values():
            sums = cls([decisions[place] for place in places])
            sums.order = [places[place] for place in sums.order]
            result.append(sums)
        return result

    @property
    def load(self) -> Tensor:
        """The counts as shares of their group, [M, G, E / G]; zeros if all tokens are padding."""
        if self._load is None:
            self._load = self.shares(self.sums.counts)
        return self._load

    def mean_softmax(self) -> Tensor:
        """The mean over tokens of the softmax of each group's logits, [M, E]."""
        logits = self._real_rows("logits")
        probs = torch.softmax(logits.unflatten(1, (self.groups, -1)), dim=-1)
        total, tokens = self._over_tokens([probs.flatten(1)])
        return total / tokens.clamp_min(1.0)

    def shares(self, x: Tensor) -> Tensor:
        """Divide each group of x by its sum; zeros stay zeros.

        Args:
            x: [M, E] ≥ 0.

        Returns:
            [M, G, E / G].
        """
        x = x.reshape(x.size(0), self.groups, -1)
        return x / (x.sum(-1, keepdim=True) + torch.finfo(x.dtype).tiny)

    @property
    def sums(self) -> Sums:
        """The sums, computed on first use."""
        if self._sums is None:
            self._sums = self._add_up()
        return self._sums

    def _add_up(self) -> Sums:
        logits = self._rows("logits").unflatten(1, (self.groups, -1))
        columns = [
            self._real_rows("probs"),
            _SquaredLogSumExp.apply(logits, self._padding).unsqueeze(1),
        ]
        if self._decisions[0].chooses_all:
            summed_probability, squares, tokens = self._over_tokens(columns)
            counts = tokens.expand_as(summed_probability)
        else:
            summed_probability, squares, counts, tokens = self._over_tokens(
                [*columns, _choices(self._decisions)]
            )
        return Sums(
            counts.detach(), summed_probability, squares.squeeze(1), tokens.detach().squeeze(1)
        )

    def entropy_and_probs(self) -> tuple[Tensor, Tensor]:
        """Means over tokens of the probabilities and of their entropy.

        Probabilities are first normalised to sum to 1 in each group, as sigmoids need not.

        Returns:
            The entropy in nats, averaged over the groups of a token, [M]; the probabilities, [M, E].
        """
        probs = self._real_rows("probs").unflatten(1, (self.groups, -1))
        probs = probs / (probs.sum(-1, keepdim=True) + torch.finfo(probs.dtype).tiny)
        entropy = entropies(probs).mean(-1, keepdim=True)
        *totals, tokens = self._over_tokens([entropy, probs.flatten(1)])
        entropy, probs = (total / tokens.clamp_min(1.0) for total in totals)
        return entropy.squeeze(1), probs

    def _joint_padding(self) -> Tensor | None:
        """The padding of all routings, [ΣN] bool; None: no routing has padding."""
        if all(d.padding is None for d in self._decisions):
            return None
        masks = []
        for decision in self._decisions:
            mask = decision.padding
            if mask is None:
                mask = decision.probs.new_zeros(decision.probs.size(0), dtype=torch.bool)
            masks.append(mask)
        return _cat(masks)

    def _rows(self, name: str) -> Tensor:
        """The rows of all routings in the field `name`, for routed experts only, [ΣN, E]."""
        rows = _cat([getattr(d, name) for d in self._decisions])
        return rows[:, self._decisions[0].shared :]

    def _real_rows(self, name: str) -> Tensor:
        """`_rows` with zeros at padding, where a NaN would stay a NaN in a sum, even times zero."""
        rows = self._rows(name)
        if self._padding is None:
            return rows
        return rows.masked_fill(self._padding.unsqueeze(1), 0.0)

    def _over_tokens(self, columns: list[Tensor]) -> tuple[Tensor, ...]:
        """Sums of columns [ΣN, W] over the real tokens of each routing, [M, W], and their number, [M, 1].

        One matrix product sums all columns of all routings that have the same number of tokens.
        """
        columns = [*columns, self._real.unsqueeze(1)]  # Σ real² = Σ real
        sizes = [decisions * tokens for decisions, tokens in self._runs]
        with full_precision(self._real.device.type):
            pairs = zip(self._runs, self._real.split(sizes), torch.cat(columns, 1).split(sizes))
            sums = [
                real.view(*run, 1).mT @ rows.view(*run, rows.size(1)) for run, real, rows in pairs
            ]
        return torch.split(_cat(sums).squeeze(1), [column.size(1) for column in columns], 1)


def entropies(probs: Tensor) -> Tensor:
    """Entropies in nats, probs [..., E] → [...]. The gradient at a probability of 0 is large, but finite."""
    terms: Tensor = torch.special.xlogy(probs, probs.clamp_min(torch.finfo(probs.dtype).tiny))
    return -terms.sum(-1)


class _SquaredLogSumExp(Function):
    """The mean over groups of (log Σ_i exp x_i)², x [R, G, E] → [R].

    At padding, [R] bool, x is replaced by 0; multiplying by zero would give NaN for inf. (torch.logsumexp
    would be nine kernels on a GPU.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Tensor | None) -> Tensor:
        filled = x
        if padding is not None:
            filled = x.masked_fill(padding[:, None, None], 0.0)
        log_probs = torch.log_softmax(filled, -1)
        # At the largest logit the difference loses no digits
        lse = filled.amax(-1) - log_probs.amax(-1)
        ctx.save_for_backward(x, padding, log_probs, lse)
        squares = lse.square()
        if squares.size(1) > 1:
            return squares.mean(-1)
        return squares.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        x, padding, log_probs, lse = ctx.saved_tensors
        if torch.is_grad_enabled():

            def plain(x: Tensor) -> Tensor:
                filled = x
                if padding is not None:
                    filled = x.masked_fill(padding[:, None, None], 0.0)
                return torch.logsumexp(filled, -1).square().mean(-1)

            (grad_x,) = differentiable_gradients(plain, (x,), (True,), grad)
            return grad_x, None
        scale = lse * (grad * (2.0 / lse.size(1))).unsqueeze(1)
        return log_probs.exp() * scale.unsqueeze(-1), None


def _cat(tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors)


def _real_tokens(decisions: Sequence[Routing], padding: Tensor | None) -> Tensor:
    """1 for the real tokens of all routings, 0 at padding, [ΣN] in the dtype of the probabilities."""
    probs = decisions[0].probs
    if padding is None:
        return probs.new_ones(sum(d.probs.size(0) for d in decisions))
    return torch.logical_not(padding, out=probs.new_empty(padding.shape))


def _choices(decisions: Sequence[Routing]) -> Tensor:
    """1 for each expert that a token selected, else 0: [ΣN, E − shared] in the dtype of the probabilities.

    Sums over tokens are then a matrix product, instead of many atomic additions to a few addresses.
    """
    shared = decisions[0].shared
    index = _cat([d.expert_ids for d in decisions])[:, shared:]
    chosen = decisions[0].probs.new_zeros(index.size(0), decisions[0].num_experts - shared)
    return chosen.scatter_(1, index - shared if shared else index, 1.0)
