"""fairseq's criterions with the routers' auxiliary losses added."""

from moa_fairseq.plugin.criterions import with_routing

__all__ = ["with_routing"]
