"""What `--arch` names: models, one file per family, and the rows of the papers' tables."""

from moa_fairseq.plugin.models import dense, gqe, latent, mae, moa, moh, namoh, switchhead

__all__ = ["dense", "gqe", "latent", "mae", "moa", "moh", "namoh", "switchhead"]
