"""Run pipesim task graphs on real devices and compare measured times with predictions."""

from typing import TYPE_CHECKING

from pipeexec import _needs_torch  # noqa: F401 - first, for its message
from pipeexec.old_names import EXPORTS
from pipesim._version import __version__ as __version__
from pipesim.utils.packages import lazy_names

if TYPE_CHECKING:
    from pipeexec.autograd_nodes import autograd_graph
    from pipeexec.checkpoints.directory import latest_checkpoint
    from pipeexec.checkpoints.load import load_checkpoint, read_checkpoint
    from pipeexec.checkpoints.save import save_checkpoint
    from pipeexec.data_parallel.accumulation import GradientAccumulation
    from pipeexec.data_parallel.sync_watch import watch_sync
    from pipeexec.devices.gpu_slices import slices
    from pipeexec.devices.make_devices import workers
    from pipeexec.distributed.join import join
    from pipeexec.embedding.sharded_embedding import ShardedEmbedding
    from pipeexec.embedding.stage import EmbeddingStage
    from pipeexec.executor.lr_schedulers import LRSchedulers
    from pipeexec.executor.pipeline import Pipeline
    from pipeexec.experts.layer import Experts
    from pipeexec.gpipe.checkpoint import is_checkpointing, is_recomputing
    from pipeexec.gpipe.gpipe import GPipe
    from pipeexec.profiling.calibration import measure, profile
    from pipeexec.projection.project import project
    from pipeexec.run_options import RunOptions
    from pipeexec.splitting.split import split
    from pipeexec.splitting.stages import Stages
    from pipeexec.stages.microbatches import Microbatches
    from pipeexec.stages.sequence_slices import KeyValueCache
    from pipeexec.stages.split_backward import SplitBackward
    from pipeexec.torch_pipelining.interop import annotate_torch_pipelining, from_torch, to_torch
    from pipeexec.training.train import train
    from pipeexec.validation.equivalence import check_equivalent
    from pipeexec.validation.result import load_run
    from pipeexec.validation.validate import validate
else:  # so that the command line answers without loading torch
    __getattr__, __dir__ = lazy_names(__spec__, EXPORTS)

__all__ = [
    "EmbeddingStage",
    "Experts",
    "GPipe",
    "GradientAccumulation",
    "KeyValueCache",
    "LRSchedulers",
    "Microbatches",
    "Pipeline",
    "RunOptions",
    "ShardedEmbedding",
    "SplitBackward",
    "Stages",
    "annotate_torch_pipelining",
    "autograd_graph",
    "check_equivalent",
    "from_torch",
    "is_checkpointing",
    "is_recomputing",
    "join",
    "latest_checkpoint",
    "load_checkpoint",
    "load_run",
    "measure",
    "profile",
    "project",
    "read_checkpoint",
    "save_checkpoint",
    "slices",
    "split",
    "to_torch",
    "train",
    "validate",
    "watch_sync",
    "workers",
]
