"""The settings of mixtures of heads in other libraries, which a model's config stores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.moh import ROUTERS
from moa_fairseq.layers.moh_routers import SCALINGS, STRAIGHT_THROUGH

OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "Wo")  # names of W_O in libraries
QUERIES = "q_proj"  # the name of the projection to queries
FUSED = "qkv"  # the name of the projection to [q | k | v] in timm


@dataclass
class MixtureSettings:
    """The settings of the mixtures of one model, which its config stores.

    Args:
        shared_heads: h_s, the number of heads that are active for every token; the first heads of a layer.
        active: h_s + K, the number of active heads of a token, shared heads included.
        router: "query-norm" compares the norms of the queries and has no parameters (MoH §4.4); "learned" has
            linear maps of the attention's input (Eq. 5-6).
        scaling: the scaling of the learned router's gates, as in `SharedAndRoutedRouter`.
        straight_through: the gates of "query-norm" that have a gradient, as in `QueryNormRouter`.
        balance: β, the coefficient of the balance loss (Eq. 7-8), which is summed over layers.
        layers: for each layer (h_s, h_s + K), or None for a layer that stays dense; replaces shared_heads and
            active.
        output: the name of the output projection in an attention, if it is not in `OUTPUTS`.
        queries: the name of the query projection, which "query-norm" reads.
    """

    shared_heads: int | None = None
    active: int | None = None
    router: str = "query-norm"
    scaling: str = "released"
    straight_through: str = STRAIGHT_THROUGH[0]
    balance: float = 0.01
    layers: Sequence[Sequence[int] | None] | None = None
    output: str | None = None
    queries: str = QUERIES

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "MixtureSettings":
        """Make settings from the fields in a call or a config, and check them.

        Args:
            fields: name → value; a field that is left out has its default.

        Raises:
            UserError: for an unknown field, an impossible value, and a field that would be ignored.
        """
        unknown = sorted(fields.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            have = ", ".join(cls.__dataclass_fields__)
            raise UserError(
                f"{', '.join(unknown)}: no setting of this version, whose settings are {have}."
            )
        settings = cls(**fields)
        settings._check_options()
        settings._check_heads()
        return settings

    def _check_heads(self) -> None:
        """Refuse settings that do not give numbers of heads in one of the two ways."""
        if self.layers is not None and not _are_layers(self.layers):
            self._refuse(
                "layers",
                "give a list of (shared heads, active), at least one, or None for what stays dense",
            )
        for name in ("shared_heads", "active"):
            number = getattr(self, name)
            if self.layers is None:
                if not _is_count(number):
                    self._refuse(name, "give a whole number of heads, or layers in place of both")
            elif number is not None:
                self._refuse(name, "leave it out, or layers, which has the numbers")

    def _check_options(self) -> None:
        """Refuse unknown names, impossible values, and what the router would ignore."""
        check_choice("router", self.router, ROUTERS)
        check_choice("scaling", self.scaling, SCALINGS)
        check_choice("straight_through", self.straight_through, STRAIGHT_THROUGH)
        if type(self.balance) not in (int, float) or not 0 <= self.balance < math.inf:
            self._refuse("balance", "give a number from 0 up")
        if not isinstance(self.output, str | None):
            self._refuse("output", "give a name, or leave it out")
        by_norms = self.router == "query-norm"
        if by_norms and self.scaling != MixtureSettings.scaling:
            self._refuse("scaling", "query-norm has none: leave it out")
        if not by_norms and self.straight_through != MixtureSettings.straight_through:
            self._refuse("straight_through", "the learned router has none: leave it out")
        if self.queries != QUERIES and not (by_norms and isinstance(self.queries, str)):
            self._refuse("queries", "name what query-norm shall read, or leave it out")

    def _refuse(self, name: str, remedy: str) -> NoReturn:
        raise UserError(f"{name}={getattr(self, name)!r} does not fit: {remedy}.")


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def _are_layers(layers: Any) -> bool:
    """Whether there is a pair of numbers, or None, for each layer, and at least one pair."""
    if not isinstance(layers, (list, tuple)):
        return False
    pairs = [pair for pair in layers if pair is not None]
    are_numbers = [
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(_is_count, pair))
        for pair in pairs
    ]
    return bool(pairs) and all(are_numbers)
