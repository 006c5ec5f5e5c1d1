"""What `--arch` and `--task` name: models, a file a family, and the rows of the papers' tables."""

from moa_fairseq.models import dense, mae, moa, moh, switchhead

__all__ = ["dense", "mae", "moa", "moh", "switchhead"]
