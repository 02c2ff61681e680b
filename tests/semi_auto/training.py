"""A network trained under each strategy of semi-automatic parallelism, and an oracle of all that it holds.

The oracle gathers parameters and optimizer states from Paddle's own tables, with the library left out of it.

``python -m tests.semi_auto.training [name ...]`` trains every strategy (or those named) in all sizes, compares each
with one process, and prints a line for each.
"""

from __future__ import annotations

import functools
import sys
import zlib

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.base.unique_name import UniqueNameGenerator

from tests.semi_auto.strategies import BY_NAME, SIZES, STRATEGIES

ROWS = 8
LEARNING_RATE, WEIGHT_DECAY = 0.01, 0.1
#: Which axis of a parameter the axis "mp" of the mesh cuts.
CUT = {"cube.weight": 2, "a.weight": 1, "a.bias": 0, "b.weight": 0}


class Cube(nn.Layer):
    """A parameter of three axes; reduces ``[rows, cube, 2, features]`` to ``[rows, features]``."""

    def __init__(self, sizes):
        super().__init__()
        self.weight = self.create_parameter([sizes.cube, 2, sizes.features])

    def forward(self, x):
        return (x * self.weight).sum([1, 2])


class Net(nn.Layer):
    """One layer of each shape that a layout has to tell apart."""

    def __init__(self, sizes):
        super().__init__()
        self.cube = Cube(sizes)
        self.norm = nn.LayerNorm(sizes.features)
        self.a = nn.Linear(sizes.features, sizes.hidden)
        self.b = nn.Linear(sizes.hidden, sizes.classes)

    def forward(self, x):
        return self.b(F.relu(self.a(self.norm(self.cube(x)))))


class HalfNet(Net):
    """Computes in float32 from parameters of half precision, for which a CPU has no kernels."""

    def forward(self, x):
        cube, norm, a, b = self.cube, self.norm, self.a, self.b
        x = (x * cube.weight.astype("float32")).sum([1, 2])
        x = F.layer_norm(x, x.shape[1:], norm.weight.astype("float32"), norm.bias.astype("float32"))
        for layer in (a, b):
            x = F.linear(F.relu(x) if layer is b else x, layer.weight.astype("float32"), layer.bias.astype("float32"))
        return x


class Built:
    """A network and its optimizer, ready for ``step``.

    Attributes:
        model: the network.
        optimizer: what the user calls ``step`` on.
    """

    def __init__(self, strategy, sizes):
        self.strategy, self.sizes = strategy, sizes
        # Optimizer states get their names when they are made, in the first step. With a generator of its own, what is
        # built second in one process has the same names as what was built first.
        self._names = UniqueNameGenerator()
        self.mesh = None
        if not strategy.dense:
            processes = np.arange(strategy.ranks).reshape(strategy.mesh)
            self.mesh = dist.ProcessMesh(processes, dim_names=list(strategy.axes))
            dist.auto_parallel.set_mesh(self.mesh)
        with paddle.utils.unique_name.guard(self._names):
            self.model = HalfNet(sizes) if strategy.half else Net(sizes)
            for key, parameter in self.model.named_parameters():
                parameter.set_value(initial(key, parameter.shape))
            if strategy.half:
                self.model.to(dtype="bfloat16")
            if self.mesh is not None and strategy.fully_shard is None:
                dist.shard_layer(self.model, self.mesh, self._place)
            self._shard_and_optimize()

    def _place(self, name, layer, mesh):
        for short, parameter in list(layer._parameters.items()):
            placements = [dist.Replicate()] * mesh.ndim
            axis = CUT.get(f"{name}.{short}")
            if self.strategy.mp and axis is not None:
                placements[mesh.dim_names.index("mp")] = dist.Shard(axis)
            layer._parameters[short] = dist.shard_tensor(parameter, mesh, placements)

    def _shard_and_optimize(self):
        strategy = self.strategy
        if strategy.fully_shard is not None:
            from paddle.distributed.fsdp import fully_shard

            fused = strategy.fully_shard == "fused"
            self.model = fully_shard(self.model, mesh=self.mesh, enable_tensor_fusion_and_overlap=fused)
        inner = paddle.optimizer.AdamW(
            LEARNING_RATE,
            parameters=self.model.parameters(),
            weight_decay=WEIGHT_DECAY,
            multi_precision=strategy.half,
        )
        self.optimizer = inner
        if strategy.dense or strategy.fully_shard is not None:
            return
        stages = {0: None, 1: dist.ShardingStage1, 2: dist.ShardingStage2, 3: dist.ShardingStage3}
        stage = stages[strategy.stage]
        self.optimizer = dist.shard_optimizer(inner, stage and stage("dp", self.mesh))
        if strategy.fusion:
            self.optimizer._enable_tensor_fusion()
            feed_main_gradients(self.model.parameters())

    @property
    def inner(self):
        """The AdamW itself."""
        return getattr(self.optimizer, "_inner_opt", self.optimizer)

    def step(self, i):
        """Trains on batch ``i``; returns the loss of the whole batch."""
        with paddle.utils.unique_name.guard(self._names):
            x, y = (paddle.to_tensor(array) for array in batch(i, self.sizes))
            if self.mesh is not None:
                cut = [dist.Shard(0) if axis == "dp" else dist.Replicate() for axis in self.mesh.dim_names]
                x, y = dist.shard_tensor(x, self.mesh, cut), dist.shard_tensor(y, self.mesh, cut)
            return train_step(self.model, self.optimizer, x, y)


def train_step(model, optimizer, x, y):
    """One step on a batch; returns its loss."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return float(loss)


def build(strategy, sizes="uneven"):
    """Builds a network and optimizer under a strategy. Collective.

    Args:
        strategy: a ``Strategy`` or the name of one.
        sizes: name of the extents of the network.
    """
    strategy = BY_NAME[strategy] if isinstance(strategy, str) else strategy
    return Built(strategy, SIZES[sizes])


def initial(key, shape, salt=""):
    """The value of a parameter at the start: follows from its name."""
    generator = np.random.RandomState(zlib.crc32((key + salt).encode()) % 2**31)
    return (generator.randn(*shape) * 0.3).astype("float32")


def batch(i, sizes):
    """The data of step ``i``: the same on every rank."""
    generator = np.random.RandomState(1000 + i)
    x = generator.randn(ROWS, sizes.cube, 2, sizes.features).astype("float32")
    return x, generator.randint(0, sizes.classes, [ROWS])


def feed_main_gradients(parameters):
    """Adds up gradients in ``main_grad``, from where tensor fusion takes them.

    Upstream does so under ``amp.auto_cast`` with master gradients only, and there is no half precision on a CPU.
    """

    def feed(parameter):
        @paddle.no_grad()
        def hook(*_):
            gradient = parameter.grad
            if gradient is None or not gradient._is_initialized():
                return
            local = gradient._local_value()
            if parameter.main_grad is None:
                parameter.main_grad = dist.auto_parallel.api.dtensor_from_local(
                    paddle.assign(local), gradient.process_mesh, gradient.placements
                )
            else:
                parameter.main_grad._local_value().add_(local)
            gradient._clear_data()

        return hook

    for parameter in parameters:
        parameter.main_grad = None
        parameter._register_backward_hook(feed(parameter))


# -- the oracle --------------------------------------------------------------------------------------------------------


def gather(built):
    """Everything that the job holds, whole, on every rank. Collective.

    Returns:
        ``{key: array}`` of parameters (``a.weight``) and states (``a.weight.moment1_0``, ``a.weight.beta1_pow_acc_0``).
    """
    tensors, pieces = local(built)
    out = {key: whole(tensor) for key, tensor in tensors.items()}
    everyone = everyones(pieces)
    if not any(everyone):
        return out
    # Outside of its forward a parameter in a fully_shard buffer has no local part; only "mp" cuts one further.
    parts = {key: list(p._local_shape if built.strategy.mp else p.shape) for key, p in built.model.named_parameters()}
    ranks = np.arange(built.strategy.ranks).reshape(built.strategy.mesh)
    if not built.strategy.mp:
        return {**out, **joined([everyone[rank] for rank in ranks], parts)}
    columns = [joined([everyone[rank] for rank in ranks[:, column]], parts) for column in range(ranks.shape[1])]
    for key, array in columns[0].items():
        axis = None if is_power(key) else CUT.get(parameter_of(key))
        out[key] = array if axis is None else np.concatenate([column[key] for column in columns], axis)
    return out


def held(built):
    """``{key: number of elements}`` on this rank, padding left out."""
    tensors, pieces = local(built)
    sizes = {key: int(np.prod(t._local_shape if t.is_dist() else t.shape)) for key, t in tensors.items()}
    return {**sizes, **{key: array.size for key, (_, array) in pieces.items()}}


def local(built):
    """What this rank holds.

    Returns:
        ``{key: tensor}`` of what Paddle describes itself, and ``{key: (start, array)}`` of flat pieces of fused
        buffers: elements from ``start`` on of this rank's part of the tensor in row-major order.
    """
    if built.strategy.fully_shard == "fused":
        return {}, _of_fully_shard(built)
    tensors = dict(built.model.named_parameters())
    if built.strategy.fusion and built.optimizer.fuse_param_view:
        return tensors, _of_fusion(built)
    keys = {parameter.name: key for key, parameter in tensors.items()}
    # Of half precision the states are of the master, and bear its name.
    masters = {keys[name]: master for name, master in built.inner._master_weights.items()}
    keys.update({master.name: key for key, master in masters.items()})
    tensors.update({f"{key}.w_0": master for key, master in masters.items()})
    for accumulator, table in built.inner._accumulators.items():
        tensors.update({f"{keys[name]}.{accumulator}_0": tensor for name, tensor in table.items()})
    return tensors, {}


def whole(tensor):
    """All of a tensor as an array. Collective for distributed ones."""
    with paddle.no_grad():
        if tensor.is_dist():
            tensor = dist.reshard(tensor, tensor.process_mesh, [dist.Replicate()] * tensor.process_mesh.ndim)
            tensor = tensor._local_value()
        return np.array(tensor.numpy())


def _of_fusion(built):
    """States of tensor fusion: a slice of the buffer for each rank of "dp"; upstream labels them replicas."""
    optimizer, pieces = built.optimizer, {}
    keys = {parameter.name: key for key, parameter in built.model.named_parameters()}
    for view, storage in zip(optimizer.fuse_param_view, optimizer.param_storage):
        first = storage.shape[0] // optimizer._sharding_group.nranks * optimizer._sharding_group.rank
        for name, entry in view.items():
            start = max(first - int(entry["index"]), 0)
            for accumulator, table in built.inner._accumulators.items():
                if name in table:
                    array = np.array(table[name]._local_value().numpy()).reshape(-1)
                    pieces[f"{keys[name]}.{accumulator}_0"] = (start, array)
    return pieces


def _of_fully_shard(built):
    """All of a fused ``fully_shard``: each rank holds a slice of each buffer, and one beta power for all of it."""
    from paddle.distributed.auto_parallel.fully_shard_fusion import get_fsdp_context

    pieces = {}
    parameters = {parameter.name: (key, parameter) for key, parameter in built.model.named_parameters()}
    for group in get_fsdp_context().buffer_manager.buffer_groups:
        buffer = group.params_buffer
        data = buffer.data_buffer
        size = data.shape[0]
        states = {
            f".{name}_0": table[data.name] for name, table in built.inner._accumulators.items() if data.name in table
        }
        arrays = {suffix: np.array(tensor.numpy()).reshape(-1) for suffix, tensor in {"": data, **states}.items()}
        for name, offset in buffer.param_offsets.items():
            key, parameter = parameters[name]
            first = size * dist.get_rank() - int(offset)
            start, stop = max(first, 0), min(first + size, int(np.prod(parameter.shape)))
            for suffix, array in arrays.items():
                if is_power(suffix):
                    pieces[key + suffix] = (0, array)
                elif start < stop:
                    pieces[key + suffix] = (start, array[start - first : stop - first])
    return pieces


def everyones(value):
    """What each rank passed, in rank order."""
    if not dist.is_initialized():  # a world of one
        return [value]
    out: list = []
    dist.all_gather_object(out, value)
    return out


def joined(tables, shapes):
    """Flat pieces ``{key: (start, array)}`` of some ranks as arrays of the shapes of their parameters.

    A beta power has no pieces: it is the same wherever it is.

    Raises:
        ValueError: elements are missing, or are there twice.
    """
    out = {}
    for key in sorted(set().union(*tables)):
        pieces = sorted((table[key] for table in tables if key in table), key=lambda piece: piece[0])
        if is_power(key):
            out[key] = pieces[0][1]
            continue
        starts = np.cumsum([0, *(array.size for _, array in pieces[:-1])]).tolist()
        if starts != [start for start, _ in pieces]:
            raise ValueError(f"{key}: pieces start at {[start for start, _ in pieces]}, not at {starts}")
        out[key] = np.concatenate([array for _, array in pieces]).reshape(shapes[parameter_of(key)])
    return out


def is_power(key):
    """Whether a key is that of a beta power, of one element."""
    return "_pow_acc_" in key


def parameter_of(key):
    """The parameter that a state belongs to: ``a.weight`` of ``a.weight.moment1_0``."""
    return ".".join(key.split(".")[:2])


# -- jobs --------------------------------------------------------------------------------------------------------------

STEPS = 3


@functools.cache
def alone(sizes):
    """Losses, and all that there is, after training in one process."""
    built = build("single", sizes)
    return [built.step(i) for i in range(STEPS)], gather(built)


def compare(strategy, sizes):
    """Trains under a strategy and compares with one process.

    Returns:
        ``loss`` and ``array``, the largest differences of a loss and of an element of any array; ``amiss``, what the
        difference of cannot be told; ``held``, see above.
    """
    losses, wanted = alone(sizes)
    built = build(strategy, sizes)
    loss = max(abs(built.step(i) - losses[i]) for i in range(STEPS))
    got = gather(built)
    shapes = [{key: array.shape for key, array in side.items()} for side in (got, wanted)]
    amiss = {
        key: [side.get(key) for side in shapes] for key in {**got, **wanted} if len({s.get(key) for s in shapes}) > 1
    }
    array = max(float(np.abs(got[key] - wanted[key]).max()) for key in got if key not in amiss)
    return {"loss": loss, "array": array, "amiss": amiss, "held": held(built)}


def main(names):
    """Runs every strategy in all sizes; see the module."""
    from paddle_flexckpt.testing import World, WorldError

    failed = 0
    for ranks in (2, 4):
        chosen = [s for s in STRATEGIES if s.ranks == ranks and (not names or s.name in names)]
        if not chosen:
            continue
        with World(ranks, timeout=300) as world:
            for strategy in chosen:
                for sizes in SIZES if strategy.ragged else ("even", "uneven"):
                    try:
                        report = world.run("tests.semi_auto.training:compare", strategy=strategy.name, sizes=sizes)[-1]
                    except WorldError as error:
                        failed += 1
                        print(f"{strategy.name:24} {sizes:7} FAILED\n{str(error)[:3000]}")
                        continue
                    told = {name: report[name] for name in ("loss", "array", "amiss")}
                    print(f"{strategy.name:24} {sizes:7} {told}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
