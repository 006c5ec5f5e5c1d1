"""A family's settings: its flags and the keywords of its attention."""

import numbers
from collections.abc import Collection, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Optional, TypeVar

from moa_fairseq.errors import UserError, did_you_mean
from moa_fairseq.layers.query_key_norm import NORM_WEIGHTS, QUERY_KEY_NORMS

if TYPE_CHECKING:
    from moa_fairseq.layers.attention import Attention

# Names of keywords in other libraries → names here
_ELSEWHERE = {
    "rope_theta": "rope_base",
    "sliding_window": "window",
    "num_kv_heads": "key_heads",
    "num_key_value_heads": "key_heads",
}
# Types of a field, the class of its values, and the name of this class in errors
_NUMBERS = (
    ((int, Optional[int]), numbers.Integral, "a whole number"),  # noqa: UP045
    ((float, Optional[float]), numbers.Real, "a number"),  # noqa: UP045
)

Settings = TypeVar("Settings", bound="FamilySettings")


def flag(default: Any, help: str, choices: Collection[str] | None = None) -> Any:
    """A field of a dataclass of settings, which is the flag `--field-name`.

    Args:
        default: the default of the field and of the flag.
        help: the text of the flag in `--help`.
        choices: the values that the flag accepts; None: all values of the field's type.
    """
    metadata: dict[str, Any] = {"help": help}
    if choices:
        metadata["choices"] = choices
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class FamilySettings:
    """The base of a family's settings, whose fields are the family's flags and the keywords of its attention.

    The fields of this class are those of every family's self-attention; an attention raises an error for a
    value that it does not support.
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
        """Return `settings`, or make settings from the keywords of an attention.

        Args:
            settings: an object of this class; None: options have its fields.
            options: the keywords of an attention. Fields of this class are removed from them, and the
                settings are added to them as `common`.

        Raises:
            TypeError: if both are given, for settings of another class, and for unknown keywords.
            UserError: for a value that is not a number, or not a whole number, where one is needed.
        """
        # False in the constructor of a base class: the subclass has checked the keywords
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
        options.setdefault("common", settings)  # which `Attention` reads
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
        """The fields of this family, without those of `FamilySettings`."""
        common = {each.name for each in fields(FamilySettings)}
        return [each for each in fields(cls) if each.name not in common]

    def in_role(self: Settings, self_attention: bool, causal: bool) -> Settings:
        """The settings of one attention of a model, without the values that do not apply to its role.

        Args:
            self_attention: whether it is a self-attention.
            causal: whether it is in a decoder.
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
            attentions: all attentions of the model, including those of other families.

        Raises:
            UserError: for settings that do not fit the model.
        """
