"""1F1B without a flush: PipeDream (arXiv 1806.03377) and PipeDream-2BW (arXiv 2006.09503)."""

from __future__ import annotations

from pipesim.errors import check_count
from pipesim.named_schedules.one_f_one_b import one_f_one_b
from pipesim.scheduling.registry import ClosedForm, Counts, register
from pipesim.scheduling.schedule import Schedule

_BUBBLE = ClosedForm(
    "(p-1)/(m+p-1)",
    lambda p, m: (p - 1) / (m + p - 1),
    "optimizer steps take no time; the more mini-batches, the nearer to 0",
)
_ACTIVATIONS = ClosedForm("min(p, m)", lambda p, m: min(p, m))


@register(
    "pipedream",
    label="PipeDream",
    summary="1F1B without a flush: every micro-batch a mini-batch, weights kept for its backward",
    source="PipeDream, arXiv 1806.03377",
    bubble=_BUBBLE,
    activations=_ACTIVATIONS,
    parameters=ClosedForm("min(p, floor(m/2)+1)", lambda p, m: min(p, m // 2 + 1)),
)
def pipedream(n_devices: int, n_microbatches: int) -> Schedule:
    """Build PipeDream's order, 1F1B of mini-batches that each update the weights.

    Three devices, four mini-batches, B as long as F::

        device 0 | F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        device 1 | .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        device 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    Every micro-batch is a mini-batch: an optimizer step follows each B, and the next F of that
    stage sees the new weights. The B of a mini-batch needs the weights that its F saw. So a device
    keeps the newest weights, and those of the F of every mini-batch in flight: from
    ``m = 2 p - 2`` on, ``p - i`` versions on device ``i`` (section 3.3 of the paper).

    For stages of equal cost, free transfers and optimizer steps of no time, the makespan is
    ``(m + p - 1)(f + b)``: the pipeline fills and drains once, and between, no device idles.
    """
    orders: Schedule = one_f_one_b(n_devices, n_microbatches)
    return orders.with_name("pipedream").with_updates(n_microbatches, "stashed")


def _batches(p: int, m: int, n_batches: int | None) -> int:
    """Return the number of mini-batches: the user's, or the first small one that suits, or 1."""
    if n_batches is not None:
        return check_count("n_batches", n_batches)
    return next((n for n in (2, 3, 5, 7) if m % n == 0 and m >= p * n), 1)


def _suits(p: int, m: int, n_batches: int | None = None) -> bool:
    n_batches = _batches(p, m, n_batches)
    return m % n_batches == 0 and m >= p * n_batches


@register(
    "pipedream_2bw",
    label="PipeDream-2BW",
    summary="1F1B without a flush between mini-batches; weights double-buffered",
    source="PipeDream-2BW, arXiv 2006.09503",
    bubble=_BUBBLE,
    activations=_ACTIVATIONS,
    parameters=ClosedForm("2", lambda p, m: 2),
    counts=Counts("equal mini-batches (n_batches) of at least as many micro-batches as there are "
                  "devices", _suits),
)  # fmt: skip
def pipedream_2bw(n_devices: int, n_microbatches: int, n_batches: int | None = None) -> Schedule:
    """Build PipeDream-2BW's order, 1F1B over all micro-batches of several mini-batches.

    Two devices, two mini-batches of two micro-batches, B as long as F::

        device 0 | F0 F1 .. B0 F2 B1 F3 B2 .. B3
        device 1 | .. F0 B0 F1 B1 F2 B2 F3 B3 ..

    Gradients add up over a mini-batch, and an optimizer step follows its last B. Forwards and
    backwards of mini-batch ``t`` see the weights after the step of mini-batch ``t - 2``. Two
    versions are thus enough for any depth of the pipeline, and no forward waits for the step of
    the previous mini-batch. For that, a mini-batch must have at least as many micro-batches as
    there are devices (section 3.1 of the paper).

    For stages of equal cost, free transfers and optimizer steps of no time, the makespan is
    ``(m + p - 1)(f + b)``, with the ``m`` micro-batches of all mini-batches.

    Parameters
    ----------
    n_devices, n_microbatches
        Counts; ``n_microbatches`` counts those of all mini-batches together.
    n_batches
        Number of mini-batches; by default the first of 2, 3, 5 and 7 that suits, else 1.
    """
    orders: Schedule = one_f_one_b(n_devices, n_microbatches)
    n_batches = _batches(n_devices, n_microbatches, n_batches)
    return orders.with_name("pipedream_2bw").with_updates(n_batches, "double_buffered")
