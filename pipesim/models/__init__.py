"""Costs from a model's sizes."""

from pipesim.models.layers import Layers
from pipesim.models.tensor_parallel import Shard
from pipesim.models.transformer import Transformer

__all__ = ["Layers", "Shard", "Transformer"]
