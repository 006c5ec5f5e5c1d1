"""A family's settings: its flags and the keywords of its attention."""

import numbers
from collections.abc import Collection, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Optional, TypeVar

from moa_fairseq.errors import UserError, did_you_mean
from moa_fairseq.layers.query_key_norm import NORM_WEIGHTS, QUERY_KEY_NORMS

if TYPE_CHECKING:
    from moa_fairseq.layers.attention import Attention

# What others call a keyword
_ELSEWHERE = {
    "rope_theta": "rope_base",
    "sliding_window": "window",
    "num_kv_heads": "key_heads",
    "num_key_value_heads": "key_heads",
}
# Types of fields, what their values are instances of, and its name
_NUMBERS = (
    ((int, Optional[int]), numbers.Integral, "a whole number"),  # noqa: UP045
    ((float, Optional[float]), numbers.Real, "a number"),  # noqa: UP045
)

Settings = TypeVar("Settings", bound="FamilySettings")


def flag(default: Any, help: str, choices: Collection[str] | None = None) -> Any:
    """A field of a dataclass of settings: `--field-name`, with a help text and, if need be, choices.

    Args:
        default: of the field, and of the flag.
        help: what `--help` says about the flag.
        choices: all values that the flag takes; None: every value of the field's type.
    """
    metadata: dict[str, Any] = {"help": help}
    if choices:
        metadata["choices"] = choices
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class FamilySettings:
    """The base of a family's settings: its fields are the family's flags, and its attention's keywords.

    Its own fields are those of every family's self-attention. An attention refuses what it cannot have.
    """

    if TYPE_CHECKING:  # fairseq's parser evaluates the annotations
        attention: ClassVar[type[Attention]]
    rope_base: Optional[float] = flag(  # noqa: UP045
        None, "base of the angles of --positions rope and rope-half (rope_theta; default: 10000)"
    )
    rope_scaling: Optional[str] = flag(  # noqa: UP045
        None,
        "JSON with slower rotations for texts longer than in training, by the names of transformers: "
        "rope_type (linear, dynamic or yarn), factor, original_max_position_embeddings, and YaRN's "
        "attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim and truncate",
    )
    rotary_dim: Optional[int] = flag(  # noqa: UP045
        None,
        "number of a head's values that --positions rope rotates (default: all of an even number)",
    )
    query_key_norm: str = flag(
        "none",
        "RMSNorm of queries and keys. head: of each head (Qwen3); rotated: of each head, after rotation; "
        "all-heads: of all heads as one vector (OLMo 2), for attention without routed heads",
        QUERY_KEY_NORMS,
    )
    query_key_norm_weight: str = flag(
        "learned", "weight of --query-key-norm: learned, or none", NORM_WEIGHTS
    )
    window: Optional[int] = flag(  # noqa: UP045
        None,
        "sliding window of a decoder's self-attention: the number of latest positions that a query sees, its "
        "own included (default: all)",
    )

    @classmethod
    def of(cls: type[Settings], settings: Settings | None, options: dict[str, Any]) -> Settings:
        """`settings`, or those that options name.

        Args:
            settings: an object of this class, or None where options have its fields.
            options: keywords of an attention. Those that are fields of this class are taken out of it, and
                the settings put into it as `common`.

        Raises:
            TypeError: where both are given, or something else, or a keyword that the attention lacks.
            UserError: for a text or a fraction in place of a number.
        """
        # And not that of a class between, which has checked them
        is_users = "common" not in options
        values = {}
        for each in fields(cls):
            if each.name in options:
                values[each.name] = options.pop(each.name)
        if settings is None:
            settings = cls(**values)
        elif not isinstance(settings, cls):
            raise TypeError(
                f"settings is {settings!r}: give {cls.__name__}, or its fields as keywords"
            )
        elif values:
            raise TypeError(
                f"{', '.join(values)} would be ignored: give either settings or its fields as keywords"
            )
        if is_users:
            cls._check_keywords(options)
        settings._check_numbers()
        options.setdefault("common", settings)  # for `Attention`, whichever class stands between
        return settings

    @classmethod
    def _check_keywords(cls, options: dict[str, Any]) -> None:
        attention = getattr(cls, "attention", None)
        if attention is None:
            return
        keywords = {each.name for each in fields(cls)} | attention.keywords()
        for name in options:
            if name not in keywords:
                alias = _ELSEWHERE.get(name)
                hint = f" (here {alias})" if alias in keywords else did_you_mean(name, keywords)
                takes = ", ".join(sorted(keywords))
                raise TypeError(
                    f"{attention.__name__} does not take {name}{hint}. It takes {takes}"
                )

    def _check_numbers(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            for kinds, number, words in _NUMBERS:
                if each.type in kinds and value is not None and not isinstance(value, number):
                    raise UserError(f"{each.name}={value!r}: give {words}.")

    @classmethod
    def own_fields(cls) -> list[Field[Any]]:
        """The fields that this family has and others need not have."""
        common = {each.name for each in fields(FamilySettings)}
        return [each for each in fields(cls) if each.name not in common]

    def in_role(self: Settings, self_attention: bool, causal: bool) -> Settings:
        """The settings of one attention of a model: without those that its role has no meaning for.

        Args:
            self_attention: whether it attends to its own input.
            causal: whether it stands in a decoder.
        """
        off: dict[str, Any] = {}
        if not self_attention:
            off = {"rope_base": None, "rope_scaling": None, "rotary_dim": None}
            if self.query_key_norm == "rotated":
                off["query_key_norm"] = "head"
        if not (self_attention and causal):
            off["window"] = None
        return replace(self, **off)

    def check(self, attentions: Sequence["Attention"]) -> None:
        """Check the settings against all attentions of a model. This base class accepts every model.

        Args:
            attentions: of the whole model, those of other families included.

        Raises:
            UserError: for settings that do not fit the model.
        """
