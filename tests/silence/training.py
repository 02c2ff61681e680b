"""Jobs of the campaign in kept-alive worlds: Paddle's layers and AdamW, saved under one degree, loaded under another.

Many runs in one call: all saves under the first degree, then all loads under the second. What parameters and
accumulators have to hold follows from their names, and a table by hand says which axis is cut.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn as nn
from paddle.distributed import fleet

import paddle_flexckpt as fc
from tests.distributed import jobs_common as common

WIDTH, INNER = 8, 16
ACCUMULATORS = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
#: The axis that is cut, by the end of a name.
AXES = {"col.weight": 1, "col.bias": 0, "row.weight": 0, "ffn.weight": 1}


class FusedColumns(fleet.meta_parallel.ColumnParallelLinear):
    """Gate and up in one parameter."""

    def _get_shard_rules(self) -> Any:
        return {"weight": fc.FusedAxis(1, "fused_ffn")}


class Net(nn.Layer):
    def __init__(self, marked: bool, layers: int = 1, prefix: str = "") -> None:
        super().__init__()
        parallel = fleet.meta_parallel
        for i in range(layers):
            block = nn.Layer()
            block.col = parallel.ColumnParallelLinear(WIDTH, INNER, has_bias=True, gather_output=True)
            block.row = parallel.RowParallelLinear(INNER, WIDTH, has_bias=True, input_is_parallel=False)
            fused = FusedColumns if marked else parallel.ColumnParallelLinear
            block.ffn = fused(WIDTH, INNER, has_bias=False, gather_output=True)
            self.add_sublayer(f"{prefix}{i}", block)


def whole(name: str, shape: tuple[int, ...], salt: str) -> np.ndarray:
    rng = np.random.RandomState(zlib.crc32(f"{salt} {name}".encode()) % 2**31)
    return rng.randn(*shape).astype("float32")


def part(name: str, owner: str, shape: tuple[int, ...], salt: str, place: int, degree: int) -> np.ndarray:
    """A rank's part of a tensor; of a fused one its share of either half."""
    end = ".".join(owner.split(".")[-2:])
    axis = AXES.get(end)
    scalar = shape == (1,)
    if axis is None or scalar:
        return whole(name, shape, salt)
    full = list(shape)
    full[axis] *= degree
    array = whole(name, tuple(full), salt)
    if end == "ffn.weight":
        return np.concatenate([np.split(half, degree, 1)[place] for half in np.split(array, 2, 1)], 1)
    return np.split(array, degree, axis)[place]


class Job:
    """A net and its optimizer with known content, or to be filled."""

    def __init__(self, degree: int, salt: str | None, marked: bool = True, layers: int = 1, prefix: str = "") -> None:
        self.degree, self.place = degree, dist.get_rank() % degree
        self.net = Net(marked, layers, prefix)
        self.optimizer = paddle.optimizer.AdamW(parameters=self.net.parameters())
        self.create_states()
        for name, tensor, owner in self.tensors():
            shape = tuple(tensor.shape)
            value = np.full(shape, -5, "float32") if salt is None else self.expected(name, owner, shape, salt)
            tensor.set_value(paddle.to_tensor(value))

    def create_states(self) -> None:
        """What the first step makes; by hand, so that the library does not know yet."""
        parameters = list(self.net.parameters())
        self.optimizer._create_accumulators(paddle.base.framework.default_main_program().global_block(), parameters)

    def tensors(self) -> Any:
        tables = self.optimizer._accumulators
        for name, parameter in self.net.named_parameters():
            yield name, parameter, name
            for table in ACCUMULATORS:
                yield f"{name}.{table}_0", tables[table][parameter.name], name

    def expected(self, name: str, owner: str, shape: tuple[int, ...], salt: str) -> np.ndarray:
        return part(name, owner, shape, salt, self.place, self.degree)

    def wrong(self, salt: str) -> list[str]:
        return [name for name, tensor, owner in self.tensors()
                if not common.same_bytes(tensor, self.expected(name, owner, tuple(tensor.shape), salt))]  # fmt: skip

    def untouched(self) -> bool:
        """Whether no parameter was filled; states of a fresh optimizer begin as they like."""
        return all((parameter.numpy() == -5).all() for parameter in self.net.parameters())

    def state(self) -> dict[str, Any]:
        model = self.net.sharded_state_dict()
        return {**model, **self.optimizer.sharded_state_dict(model)}


class InTree:
    """Paddle without ``install()``."""

    def __enter__(self) -> None:
        fc.uninstall()

    def __exit__(self, *_: object) -> None:
        fc.install()


# A mistake at the load: makes the job, and calls. Returns which salt is right, and what may come of it.
Load = Callable[[int, str], "tuple[Job, Callable[[], Any], str]"]


def _plain(degree: int, path: str) -> Any:
    job = Job(degree, None)
    return job, lambda: fc.load_state_dict(job.state(), path), "equal"


def _forgotten_install(degree: int, path: str) -> Any:
    job = Job(degree, None)

    def call() -> None:
        with InTree():
            fc.load_state_dict(job.state(), path)

    return job, call, "either"


def _fresh_in_tree(degree: int, path: str) -> Any:
    """Its states do not exist yet: what Paddle's own method gives of them is nothing."""
    job = Job(degree, None)
    job.optimizer = paddle.optimizer.AdamW(parameters=job.net.parameters())

    def call() -> None:
        with InTree():
            state = job.state()
        try:
            fc.load_state_dict(state, path)
        finally:
            job.create_states()

    return job, call, "either"


def _no_optimizer(degree: int, path: str) -> Any:
    job = Job(degree, None)
    return job, lambda: fc.load_state_dict(job.net.sharded_state_dict(), path), "error"


def _optimizer_alone(degree: int, path: str) -> Any:
    job = Job(degree, None)
    call = lambda: fc.load_state_dict(job.optimizer.sharded_state_dict(job.net.sharded_state_dict()), path)  # noqa: E731
    return job, call, "states alone"


def _swapped(degree: int, path: str) -> Any:
    job = Job(degree, None)
    manager = fc.CheckpointManager(path, preemption_signals=())
    return job, lambda: manager.restore(model=job.optimizer, optimizer=job.net, strict=False), "error"


def _swapped_in_describe(degree: int, path: str) -> Any:
    job = Job(degree, None)
    return job, lambda: fc.load_state_dict(job.optimizer.sharded_state_dict(job.net), path), "error"


def _state_dict(degree: int, path: str) -> Any:
    job = Job(degree, None)
    return job, lambda: fc.load_state_dict({**job.net.state_dict()}, path), "error"


def _both_state_dicts(degree: int, path: str) -> Any:
    job = Job(degree, None)
    call = lambda: fc.load_state_dict({**job.net.state_dict(), **job.optimizer.state_dict()}, path)  # noqa: E731
    return job, call, "either"


def _another_optimizer(degree: int, path: str) -> Any:
    """The optimizer of another model, whose parameters are named alike."""
    job, other = Job(degree, None), Job(degree, None)

    def call() -> None:
        model = job.net.sharded_state_dict()
        fc.load_state_dict({**model, **other.optimizer.sharded_state_dict(model)}, path)

    return job, call, "error"


def _unmarked(degree: int, path: str) -> Any:
    job = Job(degree, None, marked=False)
    return job, lambda: fc.load_state_dict(job.state(), path), "either"


def _more_layers(degree: int, path: str) -> Any:
    job = Job(degree, None, layers=2)
    return job, lambda: fc.load_state_dict(job.state(), path), "error"


def _other_names(degree: int, path: str) -> Any:
    job = Job(degree, None, prefix="block")
    return job, lambda: fc.load_state_dict(job.state(), path), "error"


def _half(degree: int, path: str) -> Any:
    job = Job(degree, None)
    state = job.state()
    key = sorted(k for k in state if k.endswith("weight"))[0]
    state[key].local_tensor = state[key].local_tensor.astype("bfloat16")
    return job, lambda: fc.load_state_dict(state, path), "error"


def _one_rank_without_optimizer(degree: int, path: str) -> Any:
    job = Job(degree, None)
    state = job.state()
    if dist.get_rank() == 1:
        state = {key: weight for key, weight in state.items() if key in dict(job.net.named_parameters())}
    return job, lambda: fc.load_state_dict(state, path), "either by rank"


def _wrong_group(degree: int, path: str) -> Any:
    """No group at all, the same on all ranks."""
    job = Job(degree, None)
    return job, lambda: fc.load_state_dict(job.state(), path, 3), "error"


def _wrong_group_here(degree: int, path: str) -> Any:
    job = Job(degree, None)
    group = "all" if dist.get_rank() == 0 else None
    return job, lambda: fc.load_state_dict(job.state(), path, group), "error"


def _alone(degree: int, path: str) -> Any:
    """Every rank for itself: a load needs no other."""
    job = Job(degree, None)
    return job, lambda: fc.load_state_dict(job.state(), path, "self"), "equal"


def _reshard_alone(degree: int, path: str) -> Any:
    """A reshard needs the others, unless nothing is cut."""
    source, job = Job(degree, "now"), Job(degree, None)
    call = lambda: fc.reshard_sharded_state_dict(source.state(), job.state(), "self")  # noqa: E731
    return job, call, "equal" if degree == 1 else "error of each"


def _reshard(degree: int, path: str) -> Any:
    source, job = Job(degree, "now"), Job(degree, None)
    return job, lambda: fc.reshard_sharded_state_dict(source.state(), job.state()), "equal"


def _loaded_before_the_optimizer(degree: int, path: str) -> Any:
    """A fresh optimizer: its states are made by the description."""
    job = Job(degree, None)
    job.optimizer = paddle.optimizer.AdamW(parameters=job.net.parameters())
    return job, lambda: fc.load_state_dict(job.state(), path), "equal"


LOADS: dict[str, Load] = {
    "none": _plain,
    "install() forgotten at the load": _forgotten_install,
    "install() forgotten, fresh optimizer": _fresh_in_tree,
    "the optimizer left out of the targets": _no_optimizer,
    "the optimizer alone": _optimizer_alone,
    "model and optimizer swapped in restore()": _swapped,
    "the model itself for its state": _swapped_in_describe,
    "plain state_dict() of the model": _state_dict,
    "plain state_dict() of both": _both_state_dicts,
    "the optimizer of another model": _another_optimizer,
    "the fused layer not marked": _unmarked,
    "one layer more": _more_layers,
    "layers named otherwise": _other_names,
    "half precision": _half,
    "one rank without the optimizer": _one_rank_without_optimizer,
    "a number for the group": _wrong_group,
    "a word for the group on one rank": _wrong_group_here,
    "every rank for itself": _alone,
    "a reshard of one rank alone": _reshard_alone,
    "a reshard": _reshard,
    "a fresh optimizer": _loaded_before_the_optimizer,
}


def _saved(degree: int, path: str) -> Any:
    job = Job(degree, "now")
    return lambda: fc.save_state_dict(job.state(), path), "equal"


def _saved_in_tree(degree: int, path: str) -> Any:
    job = Job(degree, "now")

    def call() -> None:
        with InTree():
            state = job.state()
        fc.save_state_dict(state, path)

    return call, "either"


def _saved_without_optimizer(degree: int, path: str) -> Any:
    job = Job(degree, "now")
    return lambda: fc.save_state_dict(job.net.sharded_state_dict(), path), "error"


def _saved_plain(degree: int, path: str) -> Any:
    job = Job(degree, "now")
    return lambda: fc.save_state_dict({**job.net.state_dict()}, path), "error"


def _saved_unmarked(degree: int, path: str) -> Any:
    job = Job(degree, "now", marked=False)
    return lambda: fc.save_state_dict(job.state(), path), "either"


def _saved_out_of_step(degree: int, path: str) -> Any:
    """One rank has another step's values; between replicas that shows."""
    salt = "then" if dist.get_rank() == dist.get_world_size() - 1 else "now"
    job = Job(degree, salt)
    return lambda: fc.save_state_dict(job.state(), path), "error"


SAVES: dict[str, Any] = {
    "install() forgotten at the save": _saved_in_tree,
    "the optimizer left out of the save": _saved_without_optimizer,
    "plain state_dict() saved": _saved_plain,
    "the fused layer not marked at the save": _saved_unmarked,
    "a rank is a step behind": _saved_out_of_step,
}
NAMES = (*LOADS, *SAVES)
#: What a description refuses, which no other rank takes part in: it raises Python's own errors.
DESCRIBING = ("the model itself for its state", "the optimizer of another model")


def outcome(call: Callable[[], Any], run: str) -> list[str] | None:
    """The error of a call.

    Raises:
        RuntimeError: Something else than an error of the library's, and ranks may have lost each other.
    """
    try:
        call()
    except fc.CheckpointError as error:
        return [type(error).__name__, str(error)]
    except Exception as error:
        if any(name in run for name in DESCRIBING) and isinstance(error, (ValueError, TypeError, AttributeError)):
            return [f"described: {type(error).__name__}", str(error)]
        raise RuntimeError(f"[{run}] raw {type(error).__name__}: {error}") from error
    return None


def runs(root: str, seeds: list[int], saved: int, loaded: int) -> list[dict[str, Any]]:
    """All runs of some seeds: saved under one degree, loaded under another."""
    fc.install()
    common.init_tensor_parallel(saved)
    results: list[dict[str, Any]] = []
    for seed in seeds:
        name = NAMES[seed % len(NAMES)]
        call, must = SAVES.get(name, _saved)(saved, os.path.join(root, str(seed)))
        results.append({"seed": seed, "name": name, "must": must, "save": outcome(call, f"seed {seed}: {name}")})
    common.init_tensor_parallel(loaded)
    for result in results:
        if result["save"] is not None:
            continue
        job, call, must = LOADS.get(result["name"], _plain)(loaded, os.path.join(root, str(result["seed"])))
        if result["name"] in LOADS:
            result["must"] = must
        result["load"] = outcome(call, f"seed {result['seed']}: {result['name']}")
        result["wrong"] = job.wrong("now")
        result["untouched"] = job.untouched()
    return results
