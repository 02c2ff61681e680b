"""A small decoder-only language model built of Paddle's own tensor- and sequence-parallel layers.

The residual stream is kept *sequence parallel*: shape ``[seq / tp, batch, hidden]``, every rank holds its own slice
of the positions.  Attention uses the sequence-parallel linears (they gather and scatter the sequence themselves), the
MLP and the head use the plain tensor-parallel linears (the block gathers and scatters around them), so that a
checkpoint of this model holds tensors of every kind of Paddle's tensor-parallel layers.

Queries, keys and values, gate and up, are separate projections whose heads (columns) are contiguous: cutting a weight
along its axis into N equal parts gives the right shards for every tensor-parallel degree N.
"""

from __future__ import annotations

import dataclasses
import math
import zlib

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_parallel import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    ColumnSequenceParallelLinear,
    GatherOp,
    RowSequenceParallelLinear,
    ScatterOp,
    mark_as_sequence_parallel_parameter,
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; every width must be divisible by every tensor-parallel degree used."""

    vocab_size: int = 256
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 8
    mlp_size: int = 768
    seq_len: int = 32


class RMSNorm(nn.Layer):
    """Root-mean-square norm.  Its weight is replicated over the tensor-parallel ranks."""

    def __init__(self, hidden_size: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = self.create_parameter([hidden_size], default_initializer=nn.initializer.Constant(1.0))
        # Each rank sees only its slice of the sequence, so the gradients have to be summed over the ranks: the hooks
        # of register_sequence_parallel_allreduce_hooks do it for the parameters marked here.
        mark_as_sequence_parallel_parameter(self.weight)
        self.epsilon = epsilon

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        variance = paddle.mean(x * x, axis=-1, keepdim=True)
        return x * paddle.rsqrt(variance + self.epsilon) * self.weight


def _rotate(x: paddle.Tensor, cos: paddle.Tensor, sin: paddle.Tensor) -> paddle.Tensor:
    """Applies rotary position embeddings to ``[batch, heads, seq, head_dim]``."""
    first, second = paddle.chunk(x, 2, axis=-1)
    return paddle.concat([first * cos - second * sin, first * sin + second * cos], axis=-1)


class Attention(nn.Layer):
    """Causal self-attention, sequence parallel in and out; each rank computes num_heads / tp heads."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        hidden = config.hidden_size
        # The sequence-parallel linears refuse a group of one rank, where they would be the plain ones anyway.
        column = ColumnSequenceParallelLinear if group.nranks > 1 else ColumnParallelLinear
        row = RowSequenceParallelLinear if group.nranks > 1 else RowParallelLinear
        self.q = column(hidden, hidden, has_bias=True, gather_output=False, mp_group=group)
        self.k = column(hidden, hidden, has_bias=True, gather_output=False, mp_group=group)
        self.v = column(hidden, hidden, has_bias=True, gather_output=False, mp_group=group)
        self.out = row(hidden, hidden, has_bias=False, input_is_parallel=True, mp_group=group)
        self.local_heads = config.num_heads // group.nranks
        self.head_dim = hidden // config.num_heads
        inverse = 10000.0 ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = np.outer(np.arange(config.seq_len), inverse).astype("float32")
        self.register_buffer("cos", paddle.to_tensor(np.cos(angles)), persistable=False)
        self.register_buffer("sin", paddle.to_tensor(np.sin(angles)), persistable=False)
        future = np.triu(np.full((config.seq_len, config.seq_len), -1e9, "float32"), k=1)
        self.register_buffer("causal_bias", paddle.to_tensor(future), persistable=False)

    def _heads(self, x: paddle.Tensor) -> paddle.Tensor:
        seq, batch = x.shape[:2]
        return x.reshape([seq, batch, self.local_heads, self.head_dim]).transpose([1, 2, 0, 3])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        q = _rotate(self._heads(self.q(x)), self.cos, self.sin)
        k = _rotate(self._heads(self.k(x)), self.cos, self.sin)
        v = self._heads(self.v(x))
        scores = paddle.matmul(q, k, transpose_y=True) / math.sqrt(self.head_dim) + self.causal_bias
        mixed = paddle.matmul(F.softmax(scores, axis=-1), v)
        batch, _, seq, _ = mixed.shape
        return self.out(mixed.transpose([2, 0, 1, 3]).reshape([seq, batch, self.local_heads * self.head_dim]))


class SwiGLU(nn.Layer):
    """Gated MLP of the plain tensor-parallel linears: it takes and returns the whole sequence."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.mlp_size
        self.gate = ColumnParallelLinear(hidden, inner, has_bias=False, gather_output=False, mp_group=group)
        self.up = ColumnParallelLinear(hidden, inner, has_bias=False, gather_output=False, mp_group=group)
        self.down = RowParallelLinear(inner, hidden, has_bias=False, input_is_parallel=True, mp_group=group)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Layer):
    """One transformer layer; the residual stream is sequence parallel."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size)
        self.attention = Attention(config, group)
        self.mlp_norm = RMSNorm(config.hidden_size)
        self.mlp = SwiGLU(config, group)
        self.is_parallel = group.nranks > 1

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        if not self.is_parallel:
            return x + self.mlp(normed)
        return x + ScatterOp.apply(self.mlp(GatherOp.apply(normed)))


class LanguageModel(nn.Layer):
    """Byte-level decoder with a vocabulary-parallel embedding, head and loss.

    Args:
        config: Sizes of the model.
        group: The tensor-parallel group.  Paddle's sequence-parallel operators always talk over the model-parallel
            group of the *current* fleet topology, so that has to be this group whenever the model runs.
    """

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        self.config = config
        self.group = group
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, mp_group=group)
        self.blocks = nn.LayerList([Block(config, group) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size)
        self.head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, has_bias=False, gather_output=False, mp_group=group
        )
        # Like the sequence-parallel linears, the parallel loss does not work in a group of one rank.
        self.loss = ParallelCrossEntropy(mp_group=group) if group.nranks > 1 else nn.CrossEntropyLoss(reduction="none")

    def forward(self, tokens: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """Returns the mean next-byte loss of ``tokens`` against ``targets``, both ``[batch, seq]``."""
        x = self.embedding(tokens.transpose([1, 0]))  # sequence first, as the sequence-parallel layers want it
        if self.group.nranks > 1:
            x = ScatterOp.apply(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.group.nranks > 1:
            x = GatherOp.apply(x)
        return self.loss(self.head(x), targets.transpose([1, 0]).unsqueeze(-1)).mean()


def split_axis(param: paddle.Tensor) -> int | None:
    """Returns the axis along which Paddle's layer cut ``param`` over the tensor-parallel ranks, None if replicated."""
    return param.split_axis if param.is_distributed else None


def initialize_weights(model: LanguageModel, seed: int) -> None:
    """Gives the model initial weights that depend on the seed and the names, not on the tensor-parallel degree.

    Every rank draws the *whole* tensor and keeps its own part, so that two degrees start from the same model.
    """
    std = 0.02
    residual_std = std / math.sqrt(2 * model.config.num_layers)
    for name, param in model.named_parameters():
        if len(param.shape) == 1:  # norm weights stay one, biases stay zero
            continue
        axis, group = split_axis(param), model.group
        shape = list(param.shape)
        if axis is not None:
            shape[axis] *= group.nranks
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        scale = residual_std if name.endswith(("attention.out.weight", "mlp.down.weight")) else std
        whole = generator.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        param.set_value(whole if axis is None else np.split(whole, group.nranks, axis)[group.rank])
