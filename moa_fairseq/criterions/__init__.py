"""fairseq's criterions with the routers' auxiliary losses added."""

from moa_fairseq.criterions import label_smoothed

__all__ = ["label_smoothed"]
