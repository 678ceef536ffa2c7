"""Learning rates of batches that accumulation or replicas made larger."""

from __future__ import annotations

import math
from typing import Literal

from pipesim.errors import ArgumentError
from pipesim.utils.checks import Count, NotNegative, checked

#: Exponent of the ratio of batch sizes.
_EXPONENTS = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}


@checked
def scaled_learning_rate(
    learning_rate: NotNegative,
    batch_size: Count,
    reference_batch_size: Count,
    *,
    rule: Literal["linear", "sqrt", "none"],
) -> float:
    """Return the learning rate for a batch of another size than the one that it was tuned for.

    Nothing scales learning rates by itself: give the result to the optimizer. With accumulation and
    replicas a batch has ``microbatch_size * n_steps * n_replicas`` samples. With
    ``k`` = ``batch_size / reference_batch_size``:

    ============ ================ ==================================================================
    rule         factor           for
    ============ ================ ==================================================================
    ``"linear"`` ``k``            SGD, with warm-up: raise the rate from ``learning_rate`` to this
                                  one over the first epochs [1]_
    ``"sqrt"``   ``sqrt(k)``      SGD, to keep the variance of the steps [2]_; Adam and RMSProp,
                                  whose betas and epsilon are scaled too [3]_
    ``"none"``   1                losses that are sums over samples, whose gradients grow with the
                                  batch, and rates that are tuned for this batch
    ============ ================ ==================================================================

    Parameters
    ----------
    learning_rate
        Tuned for ``reference_batch_size``, at least 0.
    batch_size, reference_batch_size
        Samples of an optimizer step.
    rule
        See the table.

    Returns
    -------
    float
        The learning rate.

    References
    ----------
    .. [1] Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1. arXiv:1706.02677
    .. [2] Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014,
       section 5. arXiv:1404.5997
    .. [3] Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022,
       section 4. arXiv:2205.10330

    Examples
    --------
    >>> from pipeexec.data_parallel import scaled_learning_rate
    >>> scaled_learning_rate(0.1, 4096, 256, rule="linear")
    1.6
    >>> scaled_learning_rate(1e-3, 4096, 256, rule="sqrt")
    0.004
    """
    try:
        scaled = learning_rate * math.pow(batch_size / reference_batch_size, _EXPONENTS[rule])
    except OverflowError:
        scaled = math.inf
    if math.isinf(scaled):
        raise ArgumentError(
            f"learning_rate={learning_rate} cannot be scaled from reference_batch_size to "
            "batch_size: the result is no finite number"
        )
    return scaled
