"""Rotary positions for texts that are longer than those of training, with the names of transformers."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moa_fairseq.errors import UserError, check_choice, did_you_mean

_REQUIRED = {
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
# Defaults of the authors' code
_BETA_FAST = 32
_BETA_SLOW = 1
_LEAST_RAMP = 0.001  # in pairs; a ramp of no width would divide by zero
_YARN_OPTIONS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"rope_scaling={text} is not JSON ({error}): give a value such as "
            '\'{"rope_type": "linear", "factor": 2}\'.'
        ) from None


def _check_names(mapping: Mapping[str, Any], rope_type: str) -> None:
    """Raise UserError for a name that the type does not have."""
    allowed = {"rope_type", *_REQUIRED[rope_type]}
    if rope_type == "yarn":
        allowed |= _YARN_OPTIONS
    for name in mapping:
        if name not in allowed:
            hint = did_you_mean(str(name), allowed)
            if name == "rope_theta":
                hint = " (it is rope_base here)"
            raise UserError(f"rope_scaling: {rope_type} has no {name}{hint}: leave it out.")


def _check_numbers(mapping: Mapping[str, Any], rope_type: str) -> None:
    """Raise UserError unless required values are at least 1, YaRN's options at least 0, and all finite."""
    for name in sorted(_REQUIRED[rope_type]):
        value: Any = mapping.get(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 1 <= value < math.inf:
            raise UserError(
                f"rope_scaling: {rope_type} needs {name}, a number of at least 1, not {value!r}."
            )
    for name in sorted(_YARN_OPTIONS & mapping.keys() - {"truncate"}):
        value = mapping[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < math.inf):
            raise UserError(f"rope_scaling: {name} is {value!r}: give a number, 0 or more.")


@dataclass(frozen=True)
class RopeScaling:
    """Smaller rotary angles. θ_j is the angle per position of pair j, s the factor, L the length in training.

    linear: θ_j / s (arXiv 2306.15595). dynamic: for a text of S > L positions the base is multiplied by
    (s·S/L − s + 1)^(R/(R−2)), where R numbers of a head are rotated (NTK-aware). yarn: θ_j / s for pairs that
    turn less than β_slow times in L positions, θ_j for pairs that turn more than β_fast times, and a ramp
    between them; queries and keys are multiplied by the attention factor, by default 0.1·ln s + 1 (arXiv
    2309.00071).

    Args:
        rope_type: "linear", "dynamic" or "yarn".
        factor: s.
        original_max_position_embeddings: L.
        attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, truncate: options of YaRN, with the
            meaning and defaults that transformers gives them.
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
    def from_setting(cls, setting: Mapping[str, Any] | str) -> "RopeScaling":
        """Make the scaling that a mapping, or its JSON, describes.

        Args:
            setting: fields of this class, by name.

        Raises:
            UserError: for an unknown name, and a missing or impossible value.
        """
        mapping = _decode(setting) if isinstance(setting, str) else setting
        if not isinstance(mapping, Mapping):
            raise UserError(f"rope_scaling={mapping!r}: give a mapping with rope_type and factor.")
        rope_type = mapping.get("rope_type")
        check_choice("rope_scaling: rope_type", rope_type, _REQUIRED)
        _check_names(mapping, str(rope_type))
        _check_numbers(mapping, str(rope_type))
        return cls(**mapping)

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and of rotated keys: YaRN's attention factor; 1 for other types."""
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
        """The base that "dynamic" uses for a text of a given length.

        Args:
            base: the base for texts of at most L positions.
            dim: R, the number of rotated numbers of a head, more than 2.
            length: S, a scalar in float64.
        """
        assert self.original_max_position_embeddings is not None
        longer = (length / self.original_max_position_embeddings).clamp_min(1.0)
        growth: Tensor = (self.factor * longer - (self.factor - 1)) ** (dim / (dim - 2))
        return base * growth

    def scale_angles(self, angles: Tensor, base: float) -> Tensor:
        """Scale angles as "linear" or "yarn" does, which do not depend on the text's length.

        Args:
            angles: θ_j, the angle per position of each pair, [R / 2].
            base: the base of the angles: θ_j = base^(−2j / R).

        Returns:
            The scaled angles, [R / 2].
        """
        interpolated = angles / self.factor
        if self.rope_type == "linear":
            return interpolated
        dim = 2 * angles.numel()
        # As in transformers, None and 0 are the default
        low = self._pair_with_turns(self.beta_fast or _BETA_FAST, dim, base)
        high = self._pair_with_turns(self.beta_slow or _BETA_SLOW, dim, base)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The authors' code clamps to the last of the R numbers, not to the last of the R / 2 pairs
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += _LEAST_RAMP
        pair = torch.arange(dim // 2, dtype=angles.dtype, device=angles.device)
        ramp = ((pair - low) / (high - low)).clamp(0, 1)
        return interpolated * ramp + angles * (1 - ramp)

    def _pair_with_turns(self, turns: float, dim: int, base: float) -> float:
        """The j, not rounded, of the pair that turns so many times in L positions."""
        assert self.original_max_position_embeddings is not None
        positions_per_radian = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(positions_per_radian) / (2 * math.log(base))
