"""What `--arch` names: models, one file per family, and the rows of the papers' tables."""

from moa_fairseq.plugin.models import dense, gqe, mae, moa, moh, namoh, switchhead

__all__ = ["dense", "gqe", "mae", "moa", "moh", "namoh", "switchhead"]
