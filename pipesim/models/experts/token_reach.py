"""`reached`: the share of tokens with an expert on a GPU or a node, for routers limited to groups.

A router spreads k of E experts over the tokens. With G groups of consecutive experts it first picks
M groups for each token, and the k experts among those (DeepSeek-AI, "DeepSeek-V3 Technical Report",
arXiv 2412.19437, section 2.1.2, "node-limited routing": a group is a node's experts, and M is 4).
All groups, and all experts of the picked groups, are here equally likely.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipesim.models.transformer import Transformer


def reached(model: Transformer, n: int) -> float:
    """Return the share of tokens that have one or more of n consecutive experts, 0 to 1.

    The first of them is the first of a group. Without groups it is ``1 - C(E - n, k) / C(E, k)``.

    Examples
    --------
    >>> from pipesim.models.transformer import Transformer
    >>> v3 = Transformer.preset("deepseek_v3")  # 8 groups of 32 experts
    >>> round(8 * reached(v3, 32), 2)  # nodes of a token, of at most 4
    3.63
    >>> round(reached(v3, 256), 2)
    1.0
    """
    groups, picked = model.expert_groups or 1, model.groups_per_token or 1
    size, k = model.n_experts // groups, model.experts_per_token
    whole, rest = divmod(n, size)
    touched = whole + (rest > 0)
    missed = 0.0
    for own in range(min(picked, whole) + 1):
        for part in range(1 + (rest > 0)):
            others = picked - own - part
            if not 0 <= others <= groups - touched:
                continue
            ways = math.comb(whole, own) * math.comb(groups - touched, others)
            left = picked * size - own * size - part * rest
            missed += ways * math.comb(left, k) / math.comb(picked * size, k)
    return 1 - missed / math.comb(groups, picked)
