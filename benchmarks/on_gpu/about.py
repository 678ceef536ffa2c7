"""Notes on the figures of steps, for their reports and for the page."""

from __future__ import annotations

PEERS = """\
A step without optimizer: gradients set to None, forwards, loss, backwards. Both sides have the same
modules, micro-batches and compute streams, and no CUDA graphs.
torch.distributed.pipelining: its runtime, all stages in this process, given the compute tasks in
our issue order. Events order its stages; it hands values over by reference, as ours does here.
It averages nothing: its loss is divided by the number of micro-batches, as ours is.
torchgpipe: with a stream and a worker thread a partition; the loss is that of the whole batch on
the last slice's stream, on both sides. Copies within a GPU move nothing, on both sides.
by hand: forwards in clock order and one call of autograd; on the whole GPU, plain accumulation.
Not like for like: ours times each task by two events and looks for NaN in the losses, theirs do
not; messages of ours are tasks on streams of their own, those of torch and by hand are none.
host: until the host has issued the step; of pipeexec.Pipeline, to issue its tasks alone.
""".strip()
