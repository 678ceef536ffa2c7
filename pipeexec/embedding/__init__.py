"""Embedding tables whose rows are spread over processes."""

from pipeexec.embedding.sharded_embedding import ShardedEmbedding
from pipeexec.embedding.stage import EmbeddingStage

__all__ = ["EmbeddingStage", "ShardedEmbedding"]
