"""Jobs of test_fully_shard: frozen and tied parameters in the buffers of ``fully_shard``."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.parallel import fully_shard


class Net(paddle.nn.Layer):
    """An embedding whose weight is used twice, a frozen layer, and a batch norm, whose statistics are frozen too."""

    def __init__(self, mesh):
        super().__init__()
        self.embedding = paddle.nn.Embedding(7, 5)
        self.frozen = paddle.nn.Linear(5, 5)
        self.norm = paddle.nn.BatchNorm1D(5)
        self.head = paddle.nn.Linear(5, 7)
        for i, parameter in enumerate(self.parameters()):
            parameter.set_value(np.random.RandomState(i).rand(*parameter.shape).astype("float32"))
        for parameter in self.frozen.parameters():
            parameter.stop_gradient = True
        if mesh is not None:
            # fully_shard makes two parameters of a dense one with two names, and then fails.
            weight = dist.shard_tensor(self.embedding.weight, mesh, [dist.Replicate()])
            self.embedding.weight = weight
        self.decoder = paddle.nn.Layer()
        self.decoder.weight = self.embedding.weight

    def get_input_embeddings(self):
        """Tells ``fully_shard`` which parameter is tied: it gets a buffer of its own."""
        return self.embedding

    def forward(self, x):
        return self.head(self.norm(self.frozen(self.embedding(x))))


def fused(mesh):
    """A network in fused buffers, and its values before."""
    from paddle.distributed.fsdp import fully_shard

    dist.auto_parallel.set_mesh(mesh)
    with paddle.utils.unique_name.guard():
        model = Net(mesh)
        values = {key: np.array(tensor.numpy()) for key, tensor in model.state_dict().items()}
        fully_shard(model, mesh=mesh)
    return model, values


def differing(shards, values):
    """Keys whose shard is not the part of the value that it says."""
    wrong = []
    for key, weight in shards.items():
        part = values[key].reshape(-1)[weight.flattened_range]
        if not np.array_equal(weight.local_tensor.numpy(), part):
            wrong.append(key)
    return wrong


def loaded(path):
    """A load over what an earlier forward has gathered.

    Returns:
        ``stale``: keys that are not loaded; ``output``: whether the forward after it is that of the dense network;
        the names of the states; ranges and aliases of the parameters.
    """
    fc.install()
    mesh = dist.ProcessMesh(list(range(dist.get_world_size())), dim_names=["dp"])
    x = np.arange(6)
    model, values = fused(mesh)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    shards = model.sharded_state_dict()
    wrong = differing(shards, values)
    states = optimizer.sharded_state_dict(shards)
    fc.save_state_dict({**shards, **states}, path)

    with paddle.no_grad():
        for weight in shards.values():
            weight.local_tensor.zero_()
    model.eval()
    with paddle.no_grad():
        zeros = model(dist.shard_tensor(paddle.to_tensor(x), mesh, [dist.Replicate()]))
    shards = model.sharded_state_dict()
    fc.load_state_dict({**shards, **optimizer.sharded_state_dict(shards)}, path)
    with paddle.no_grad():
        got = model(dist.shard_tensor(paddle.to_tensor(x), mesh, [dist.Replicate()]))
    dense = Net(None)
    dense.eval()
    return {
        "wrong": wrong,
        "zeros": float(zeros._local_value().abs().sum()),
        "stale": differing(shards, values),
        "output": np.array_equal(got._local_value().numpy(), dense(paddle.to_tensor(x)).numpy()),
        "states": sorted(states),
        "ranges": {key: [w.flattened_range.start, w.flattened_range.stop] for key, w in shards.items()},
        "aliases": {key: list(weight.aliases) for key, weight in shards.items() if weight.aliases},
    }


def two_axes(directory):
    """Fused on a mesh of two axes, of which Paddle shards over the one called dp.

    Returns:
        The elements of a buffer that this rank holds, and of the whole; what a check says, and what a save.
    """
    fc.install()
    mesh = dist.ProcessMesh([list(range(dist.get_world_size()))], dim_names=["dp", "mp"])
    model, _ = fused(mesh)
    context = fully_shard.fused_context()
    buffer = context.buffer_manager.buffer_groups[0].params_buffer
    texts = []
    for call in (lambda: fc.check(model), lambda: fc.save_state_dict(model.sharded_state_dict(), directory)):
        try:
            call()
        except (ValueError, fc.CheckpointError) as error:
            texts.append(str(error))
    return int(buffer.data_buffer.shape[0]), int(buffer.total_buffer_size), texts
