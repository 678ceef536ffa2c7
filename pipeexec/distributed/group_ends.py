"""End of process groups: waits for messages that will not come, and gloo's own threads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeexec.process_end import end_threads

#: Tag of a message that nobody sends; those of channels count from 0.
_NEVER_SENT = (1 << 31) - 1


def break_group(group: dist.ProcessGroup, ranks: Iterable[int]) -> None:
    """Let all waits of this process for messages of a gloo group end with an error.

    ``ranks`` are those of the group without this process, numbered within the group. The group
    cannot be used again. gloo neither aborts a wait nor ends it with the group: it does so if
    another wait of the group exceeds its timeout, as then it closes all sockets of the group.
    """
    for rank in ranks:
        with suppress(RuntimeError):  # this connection is broken already
            work = group.recv([torch.empty(1)], rank, _NEVER_SENT)
            work.wait(timedelta(milliseconds=1))


def end_groups(pid: int) -> None:
    """End the threads of process groups while Python still runs.

    A thread of gloo that frees a tensor later aborts the process (pytorch/pytorch, issue 190489). A
    forked child does not have the threads. Threads of streams wait for messages of the groups, so
    they end first.
    """
    if dist.is_initialized() and os.getpid() == pid:
        end_threads()
        dist.destroy_process_group()
