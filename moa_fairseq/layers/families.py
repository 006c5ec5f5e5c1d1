"""The families of mixtures, by name: what an attention is built from."""

from moa_fairseq.layers.dense import DenseSettings
from moa_fairseq.layers.gqe import GQESettings
from moa_fairseq.layers.latent import LatentSettings
from moa_fairseq.layers.mae import MAESettings
from moa_fairseq.layers.moa import MoASettings
from moa_fairseq.layers.moh import MoHSettings
from moa_fairseq.layers.namoh import NAMOHSettings
from moa_fairseq.layers.settings import FamilySettings
from moa_fairseq.layers.switchhead import SwitchHeadSettings

# Family → the class of its settings. No family is the default.
FAMILIES: dict[str, type[FamilySettings]] = {}


def register_family(name: str, settings: type[FamilySettings]) -> None:
    """Make a family known to models: `attention_family` of a model class names it.

    Args:
        name: of the family; one that is known already is replaced.
        settings: its fields become flags, and its `attention` is the class that is built.
    """
    FAMILIES[name] = settings


register_family("moa", MoASettings)
register_family("mae", MAESettings)
register_family("moh", MoHSettings)
register_family("switchhead", SwitchHeadSettings)
register_family("gqe", GQESettings)
register_family("namoh", NAMOHSettings)
register_family("dense", DenseSettings)
register_family("latent", LatentSettings)
