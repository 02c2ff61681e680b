"""The model that all strategies train: the same parameters under the same names, cut as the strategy says.

Layer ``i`` is called ``i``, as in a pipeline: an embedding, blocks, and a head that is tied to the embedding or not.
Its sizes do not divide evenly into buffers, and it has parameters of one, two and three axes, of one element, a frozen
one, and one whose gradient is zero.
"""

from __future__ import annotations

import zlib

import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from paddle.distributed.fleet.utils import sequence_parallel_utils as sequence

BLOCKS, VOCABULARY, HIDDEN, INNER, LENGTH = 8, 24, 12, 20, 8
AXES = {"embedding.weight": 0, "fc1.weight": 1, "fc1.bias": 0, "fc2.weight": 0}


def _group():
    return fleet.get_hybrid_communicate_group().get_model_parallel_group()


class Embedding(nn.Layer):
    """The embedding, and the head that is tied to it."""

    def __init__(self, mp=1):
        super().__init__()
        parallel = fleet.meta_parallel.VocabParallelEmbedding
        self.embedding = parallel(VOCABULARY, HIDDEN) if mp > 1 else nn.Embedding(VOCABULARY, HIDDEN)
        self.mp = mp

    @property
    def embedding_weight(self):
        return self.embedding.weight

    def forward(self, tokens):
        return self.embedding(tokens)


def tied_head(layer, x):
    """Logits from the embedding's weight."""
    if layer.mp == 1:
        return paddle.matmul(x, layer.embedding_weight, transpose_y=True)
    logits = paddle.matmul(mp_ops._c_identity(x, group=_group()), layer.embedding_weight, transpose_y=True)
    return mp_ops._c_concat(logits, group=_group())


class Head(nn.Layer):
    """A head of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, VOCABULARY, bias_attr=False)

    def forward(self, x):
        return self.linear(x)


class Block(nn.Layer):
    """An MLP, and parameters of every shape that optimizers have to cut."""

    def __init__(self, mp=1, sequence_parallel=False):
        super().__init__()
        self.ln = nn.LayerNorm(HIDDEN)
        self.sequence_parallel = sequence_parallel
        if sequence_parallel:
            self.fc1 = sequence.ColumnSequenceParallelLinear(HIDDEN, INNER, has_bias=True, gather_output=False)
            self.fc2 = sequence.RowSequenceParallelLinear(INNER, HIDDEN, has_bias=True, input_is_parallel=True)
        elif mp > 1:
            column, row = fleet.meta_parallel.ColumnParallelLinear, fleet.meta_parallel.RowParallelLinear
            self.fc1 = column(HIDDEN, INNER, has_bias=True, gather_output=False)
            self.fc2 = row(INNER, HIDDEN, has_bias=True, input_is_parallel=True)
        else:
            self.fc1, self.fc2 = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.cube = self.create_parameter([3, 5, 7])
        self.gain = self.create_parameter([1])
        self.idle = self.create_parameter([5])
        self.frozen = self.create_parameter([4])
        self.frozen.stop_gradient = True

    def forward(self, x):
        y = self.ln(x)
        if self.sequence_parallel:
            y = sequence.ScatterOp.apply(y.transpose([1, 0, 2]).contiguous())
        y = self.fc2(F.relu(self.fc1(y)))
        if self.sequence_parallel:
            y = sequence.GatherOp.apply(y).transpose([1, 0, 2])
        return x + y * self.gain + self.cube.mean() + self.frozen.sum() * 1e-2 + 0.0 * self.idle.sum()


class Loss(nn.Layer):
    """Mean cross entropy."""

    def forward(self, logits, labels):
        return F.cross_entropy(logits, labels.unsqueeze(-1), reduction="none").mean()


class Stack(nn.Layer):
    """The whole model on every rank; its layers have a pipeline's names."""

    def __init__(self, strategy, tied):
        super().__init__()
        self.tied, self.loss = tied, Loss()
        self.add_sublayer("0", Embedding(strategy.mp))
        for i in range(BLOCKS):
            self.add_sublayer(str(i + 1), Block(strategy.mp, strategy.sequence))
        if not tied:
            self.add_sublayer(str(BLOCKS + 1), Head())

    def forward(self, tokens, labels):
        x = self._sub_layers["0"](tokens)
        for i in range(BLOCKS):
            x = self._sub_layers[str(i + 1)](x)
        logits = tied_head(self._sub_layers["0"], x) if self.tied else self._sub_layers[str(BLOCKS + 1)](x)
        return self.loss(logits, labels)


def build(strategy, tied):
    """The model of a strategy, before any wrapper."""
    if strategy.pp == 1 and not strategy.pipelined:
        return Stack(strategy, tied)
    blocks = [LayerDesc(Block, strategy.mp, strategy.sequence) for _ in range(BLOCKS)]
    if tied:
        shared = {"shared_weight_attr": "embedding_weight"}
        first = SharedLayerDesc("embedding", Embedding, mp=strategy.mp, **shared)
        last = SharedLayerDesc("embedding", Embedding, forward_func=tied_head, mp=strategy.mp, **shared)
    else:
        first, last = LayerDesc(Embedding, strategy.mp), LayerDesc(Head)
    virtual = {"num_virtual_pipeline_stages": strategy.chunks} if strategy.chunks > 1 else {}
    return PipelineLayer(
        [first, *blocks, last],
        num_stages=strategy.pp,
        loss_fn=Loss(),
        topology=fleet.get_hybrid_communicate_group().topology(),
        seg_method="layer:Block",
        **virtual,
    )


def fill(sharded, salt):
    """Gives every tensor its part of a global value that follows from its name and the salt."""
    for key, weight in sharded.items():
        generator = np.random.RandomState(zlib.crc32((key + salt).encode()) % 2**31)
        value = (generator.randn(*weight.global_shape) * 0.3).astype("float32")
        part = value[tuple(slice(o, o + n) for o, n in zip(weight.global_offset, weight.local_shape))]
        if weight.is_flattened:
            part = part.reshape(-1)[weight.flattened_range]
        # In place: the tensor may be a view of a buffer.
        with paddle.no_grad():
            weight.local_tensor.copy_(paddle.to_tensor(part).astype(weight.local_tensor.dtype), True)
