"""The cost of an attention layer as SwitchHead's authors count it."""

from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.moa import MixtureOfAttention
from moa_fairseq.layers.positions import RelativePositions
from moa_fairseq.layers.switchhead import SwitchHeadAttention


def published_cost(attention: Attention, length: int, chunks: int) -> dict[str, int] | None:
    """The cost of a layer for a chunk of tokens as SwitchHead's authors count it (arXiv 2312.07987).

    The formulas give the numbers printed in their Tables 1-3 and 7, from which their own Eq. 11-15 differ.

    Args:
        attention: the attention of a layer.
        length: the number of tokens of the chunk.
        chunks: the number of chunks that the tokens attend to: 2 with a carried chunk, else 1.

    Returns:
        "macs", the number of multiply-accumulates, and "floats", the number of values that training stores.
        None if the authors have no formula for the attention.
    """
    # n heads of width d; T tokens, which attend to C chunks; k of E experts
    n = attention.num_heads
    d = attention.head_dim
    T = length
    C = chunks
    width = attention.embed_dim
    positions = 2 if isinstance(attention.positions, RelativePositions) else 0
    # Queries by keys, and weights by values
    macs = 2 * C * n * d * T**2
    floats = 2 * C * n * T**2
    if isinstance(attention, MixtureOfAttention) and attention.key_heads == 1 and positions:
        k = 2  # the authors' script has this k for every n
        E = attention.num_experts
        macs += (2 * n + 2 + 2 * C) * d * width * T + n * k * d * T + E * width * T
        floats += (2 * n + 4) * d * T + E * C * T
    elif isinstance(attention, SwitchHeadAttention) and not attention.experts:  # dense: Eq. 11-12
        macs += (4 + positions * C) * n * d * width * T
        floats += (4 + positions * C) * n * d * T
    elif isinstance(attention, SwitchHeadAttention) and attention.experts == "vo":
        # Here the printed numbers have the positions of one chunk
        k = attention.experts_per_token
        E = attention.num_experts
        routers = 1 if attention.shares_selection else 2
        macs += (2 * k + 2 + positions) * n * d * width * T
        macs += 2 * n * k * d * T + routers * E * C * width * T
        floats += (4 + positions) * n * d * T + routers * E * C * T
    else:
        return None
    return {"macs": macs, "floats": floats}
