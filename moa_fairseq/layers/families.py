"""The registry of families: the settings of each kind of attention, by name."""

from moa_fairseq.layers.dense import DenseSettings
from moa_fairseq.layers.gqe import GQESettings
from moa_fairseq.layers.latent import LatentSettings
from moa_fairseq.layers.mae import MAESettings
from moa_fairseq.layers.moa import MoASettings
from moa_fairseq.layers.moh import MoHSettings
from moa_fairseq.layers.namoh import NAMOHSettings
from moa_fairseq.layers.settings import FamilySettings
from moa_fairseq.layers.switchhead import SwitchHeadSettings

# The name of a family → the class of its settings
FAMILIES: dict[str, type[FamilySettings]] = {}


def register_family(name: str, settings: type[FamilySettings]) -> None:
    """Register a family, which a model class then names as its `attention_family`.

    Args:
        name: the name of the family; a family registered before under this name is replaced.
        settings: the class of settings. Its fields become flags, and its `attention` is the class that is
            built.
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
