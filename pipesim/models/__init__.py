"""Costs of a pipeline from the sizes of a model: GPUs, transformers, and profiled layers."""

from pipesim.costs.costs import Costs
from pipesim.models.data_sheets import gpus
from pipesim.models.encoders import Encoder
from pipesim.models.gpu import GPU, Kernel
from pipesim.models.layers import Layers
from pipesim.models.packing import Packing
from pipesim.models.parallel import Parallel
from pipesim.models.published_models import transformers
from pipesim.models.routing import Routing
from pipesim.models.shard import Shard
from pipesim.models.transformer import Transformer
from pipesim.utils.accessors import add_constructors, add_methods

__all__ = [
    "GPU",
    "Encoder",
    "Kernel",
    "Layers",
    "Packing",
    "Parallel",
    "Routing",
    "Shard",
    "Transformer",
    "gpus",
    "transformers",
]

add_methods(Transformer, pack="pipesim.models.packing:pack_documents")
add_constructors(
    Costs,
    from_layers="pipesim.models.layers:costs_from_layers",
    transformer="pipesim.models.model_costs:costs_from_sizes",
)
