"""Tensor and sequence parallel layers: which axis of which parameter is cut.

The axes are those along which Paddle's layers cut their parameters: a column-parallel weight ``[in, out]`` by outputs,
a row-parallel one by inputs, an embedding ``[vocabulary, hidden]`` by vocabulary. The sequence-parallel linears cut
their parameters in the same way; only their activations differ.
"""

from __future__ import annotations


class VocabParallelMixin:
    """Split a VocabParallelEmbedding."""

    def _get_shard_rules(self) -> dict[str, int]:
        """Return that the vocabulary is split."""
        return {"weight": 0}


class ColumnParallelMixin:
    """Split a ColumnParallelLinear or ColumnSequenceParallelLinear."""

    def _get_shard_rules(self) -> dict[str, int]:
        """Return that the outputs are split, and with them the bias."""
        return {"weight": 1, "bias": 0}


class RowParallelMixin:
    """Split a RowParallelLinear or RowSequenceParallelLinear."""

    def _get_shard_rules(self) -> dict[str, int]:
        """Return that the inputs are split; the bias is added after the sum, so every rank has all of it."""
        return {"weight": 0}
