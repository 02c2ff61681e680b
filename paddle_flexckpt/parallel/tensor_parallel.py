"""Tensor and sequence parallel layers: which axis of which parameter is cut.

The axes are those along which Paddle's layers cut their parameters: a column-parallel weight ``[in, out]`` by outputs,
a row-parallel one by inputs, an embedding ``[vocabulary, hidden]`` by vocabulary. The sequence-parallel linears cut
their parameters in the same way; only their activations differ.
"""

from __future__ import annotations


class VocabParallelMixin:
    """For VocabParallelEmbedding."""

    def _get_shard_rules(self) -> dict[str, int]:
        """The vocabulary is cut."""
        return {"weight": 0}


class ColumnParallelMixin:
    """For ColumnParallelLinear and ColumnSequenceParallelLinear."""

    def _get_shard_rules(self) -> dict[str, int]:
        """The outputs are cut, and with them the bias."""
        return {"weight": 1, "bias": 0}


class RowParallelMixin:
    """For RowParallelLinear and RowSequenceParallelLinear."""

    def _get_shard_rules(self) -> dict[str, int]:
        """The inputs are cut; the bias is added after the sum, so every rank has all of it."""
        return {"weight": 0}
