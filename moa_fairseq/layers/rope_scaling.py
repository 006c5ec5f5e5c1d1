"""Rotary positions for texts longer than those of training, by the names that transformers gives them."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from moa_fairseq.errors import UserError, check_choice, did_you_mean

_NEEDED = {
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
_OF_YARN = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotations. θ_j is the angle per position of pair j, s the factor, L the length in training.

    linear: θ_j / s (arXiv 2306.15595). dynamic: for a text of S > L positions the base is multiplied by
    (s·S/L − s + 1)^(R/(R−2)) (NTK-aware). yarn: θ_j / s of pairs that turn less than β_slow times in L
    positions, θ_j of those that turn more than β_fast times, a ramp between them; queries and keys are
    multiplied by the attention factor, by default 0.1·ln s + 1 (arXiv 2309.00071).

    Args:
        rope_type: "linear", "dynamic" or "yarn".
        factor: s.
        original_max_position_embeddings: L.
        attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, truncate: YaRN's, as transformers
            reads them.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def of(cls, mapping: Mapping[str, Any] | str) -> "RopeScaling":
        """The scaling that a mapping, or its JSON, describes.

        Args:
            mapping: a value for "rope_type" and for each field that this type has.

        Raises:
            UserError: for an unknown, missing or impossible value.
        """
        if isinstance(mapping, str):
            try:
                mapping = json.loads(mapping)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"rope_scaling={mapping} is not JSON ({error}): give a value such as "
                    '\'{"rope_type": "linear", "factor": 2}\'.'
                ) from None
        if not isinstance(mapping, Mapping):
            raise UserError(f"rope_scaling={mapping!r}: give a mapping with rope_type and factor.")
        kind = mapping.get("rope_type")
        check_choice("rope_scaling: rope_type", kind, _NEEDED)
        needed = _NEEDED[str(kind)]
        allowed = {"rope_type", *needed, *(_OF_YARN if kind == "yarn" else ())}
        for name in mapping:
            if name not in allowed:
                hint = did_you_mean(str(name), allowed)
                if name == "rope_theta":
                    hint = " (it is rope_base here)"
                raise UserError(f"rope_scaling: {kind} has no {name}{hint}: leave it out.")
        for name in sorted(needed):
            value = mapping.get(name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 1 <= value < math.inf
            ):
                raise UserError(
                    f"rope_scaling: {kind} needs {name}, a number of at least 1, not {value!r}."
                )
        return cls(
            **{each.name: mapping[each.name] for each in fields(cls) if each.name in mapping}
        )

    @property
    def magnitude(self) -> float:
        """YaRN's attention factor, of rotated queries and of rotated keys; 1 of the others."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def base_at(self, base: float, dim: int, length: Tensor) -> Tensor:
        """The base of a text of so many positions.

        Args:
            base: of texts as long as those of training.
            dim: R, how many numbers are rotated, more than 2.
            length: S, a scalar in float64.
        """
        assert self.original_max_position_embeddings is not None
        longer = (length / self.original_max_position_embeddings).clamp_min(1.0)
        growth: Tensor = (self.factor * longer - (self.factor - 1)) ** (dim / (dim - 2))
        return base * growth

    def scaled(self, speed: Tensor, base: float) -> Tensor:
        """θ_j [R / 2] after a scaling that does not follow the text's length.

        Args:
            speed: θ_j before.
            base: the one of which they are made.
        """
        slow = speed / self.factor
        if self.rope_type == "linear":
            return slow
        dim = 2 * speed.numel()
        low, high = (self._pair_that_turns(times, dim, base) for times in (self._fast, self._slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        pair = torch.arange(dim // 2, dtype=speed.dtype, device=speed.device)
        ramp = ((pair - low) / (high - low)).clamp(0, 1)
        return slow * ramp + speed * (1 - ramp)

    @property
    def _fast(self) -> float:
        return self.beta_fast or 32

    @property
    def _slow(self) -> float:
        return self.beta_slow or 1

    def _pair_that_turns(self, times: float, dim: int, base: float) -> float:
        """The j, not rounded, whose pair turns so often in L positions."""
        assert self.original_max_position_embeddings is not None
        turns = self.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(base))
