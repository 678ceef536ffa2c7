"""DualPipeV: DualPipe folded into a V, with overlapped forwards and backwards (DeepSeek-AI)."""

from __future__ import annotations

from pipesim.named_schedules.phases import Phase, order_of
from pipesim.scheduling.placement import v_shaped
from pipesim.scheduling.registry import ClosedForm, Counts, register
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.host_memory import check_schedule


@register(
    "dualpipev",
    summary="DualPipe folded into a V: F and B of two micro-batches hide each other's messages",
    source="github.com/deepseek-ai/DualPipe; DualPipe: DeepSeek-V3, arXiv 2412.19437, 3.2.1",
    bubble=ClosedForm(
        "(p-1)/(3m+p-1)",
        lambda p, m: (p - 1) / (3 * m + p - 1),
        assumes="an overlapped F and B last as long as both",
    ),
    activations=ClosedForm("p + 1/2", lambda p, m: p + 0.5),
    counts=Counts("at least 2p micro-batches", lambda p, m: m >= 2 * p),
)
def dualpipev(n_devices: int, n_microbatches: int) -> Schedule:
    """Build the DualPipeV order.

    Two devices of two chunks each, four micro-batches, B, I and W as long as F, and an overlapped
    F and B (written one after the other) as long as both::

        device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 ..  3F3 0B1 3B3 0I2 0W2 0I3 0W3
        device 1 | ..  1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 ..  2I3 1I3 2W3 1W3

    Once a device has a forward of one chunk and a backward of the other to do, it runs them as one
    action, so that the messages of each travel while the other computes. Backwards are split on
    the way into that phase and out of it. Where F and I of a chunk last ``f``, W ``w <= f``, B
    ``b = f + w`` and an overlapped pair ``f&b``, each device idles for ``(p - 1)(f&b + b - 3 w)``.
    It holds ``2p + 1`` activations of a chunk.

    Parameters
    ----------
    n_devices
        Any positive count.
    n_microbatches
        At least one for each of the ``2p`` stages.
    """
    p, m = n_devices, n_microbatches
    check_schedule("dualpipev", 4 * p * m)
    return Schedule.from_columns(
        "dualpipev", v_shaped(p), m, (order_of(i, p, _phases(i, p, m)) for i in range(p))
    )


def _phases(i: int, p: int, m: int) -> list[Phase]:
    """Return the order of device ``i``.

    The last backwards come in pairs, of which the second half is split. Their W are run in the
    order of the I, while the last gradients of the chunk on the way down are awaited.
    """
    pairs = ["1", "0"] * (i + 1)
    ending = " ".join(f"{'B' if k <= i else 'I'}{chunk}" for k, chunk in enumerate(pairs))
    weights = [f"W{chunk}" for chunk in pairs[i + 1 :]] + ["W0"] * (p - 1 - i)
    alone = i == p - 1  # the turn of the V has a B at once, with no message to hide
    return [
        ("F0", 2 * (p - 1 - i)),
        ("F0 F1", i + 1),
        ("I1 W1 F1", p - 1 - i),
        ("F0 B1 F1&B0", int(alone)),
        ("F0&B1 F1&B0", m - (2 * p - 1 - i) - alone),
        ("B1 F1&B0", p - 1 - i),
        (ending, 1),
        *((f"{weight} I0", 1) for weight in weights[: p - 1 - i]),
        (" ".join(weights[p - 1 - i :]), 1),
    ]
