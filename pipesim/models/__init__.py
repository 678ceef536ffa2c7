"""Costs of a pipeline from the sizes of a model: transformers, and profiled layers."""

from pipesim.models.layers import Layers
from pipesim.models.tensor_parallel import Shard
from pipesim.models.transformer import Transformer

__all__ = ["Layers", "Shard", "Transformer"]
