"""Flows of one process in which callers err: networks, quantised weights, schedules, remedies, forks.

A flow makes random networks, saves, loads in a way that a user might, and judges what came of it: bit-equal to what was
saved, or an error of the library's. Networks have parameters of equal shapes, so that only their names tell them apart.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import paddle
from paddle.utils import unique_name

import paddle_flexckpt as fc
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.trainer.flags import options_of
from tests.property.layouts import Pick
from tests.silence.flow import flow, judged, refused
from tests.silence.judge import Finding


class Job:
    """Networks of one shape under one optimizer, made in some order in what stands for a process of its own."""

    def __init__(self, names: Sequence[str], order: Sequence[int], trained: bool, rate: Any = 0.1) -> None:
        with unique_name.guard():
            made = {i: paddle.nn.Linear(3, 3) for i in order}
            self.net = paddle.nn.Layer()
            for i, name in enumerate(names):
                self.net.add_sublayer(name, made[i])
            self.optimizer = paddle.optimizer.AdamW(rate, parameters=self.net.parameters())
            if trained:
                x = paddle.ones([1, 3])
                sum((i + 1) * layer(x).sum() for i, layer in enumerate(self.net.children())).backward()
                self.optimizer.step()

    def moments(self) -> dict[str, list]:
        """The first moment of each parameter, by its place in the network."""
        table = self.optimizer._accumulators.get("moment1", {})
        return {name: table[p.name].numpy().tolist() for name, p in self.net.named_parameters() if p.name in table}

    def weights(self) -> dict[str, list]:
        return {name: p.numpy().tolist() for name, p in self.net.named_parameters()}

    def shards(self) -> dict[str, Any]:
        model = self.net.sharded_state_dict()
        return {**model, **self.optimizer.sharded_state_dict(model)}

    def plain(self, nested: bool = True) -> dict[str, Any]:
        states = {k: v for k, v in self.optimizer.state_dict().items() if hasattr(v, "numpy")}
        return {"model": self.net.state_dict(), "optimizer": states} if nested else {**self.net.state_dict(), **states}


@flow("networks are made in another order")
def _another_order(pick: Pick, root: Path) -> str:
    names = [f"net{i}" for i in range(pick.integer(2, 4))]
    orders = [_shuffled(pick, len(names)) for _ in "ab"]
    saved, loaded = Job(names, orders[0], True), Job(names, orders[1], bool(pick.integer(0, 1)))
    ways = [Job.shards, Job.plain, lambda job: job.plain(nested=False)]
    save, load = pick.choice(ways), pick.choice(ways)
    fc.save_state_dict(save(saved), root / "x")
    loaded.shards()  # the states exist
    error = refused(lambda: fc.load_state_dict(load(loaded), root / "x", strict="missing"))
    found = (loaded.weights(), loaded.moments())
    return judged(error, found, (saved.weights(), saved.moments()), f"order {orders}")


def _shuffled(pick: Pick, count: int) -> list[int]:
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        j = pick.integer(0, i)
        order[i], order[j] = order[j], order[i]
    return order


@flow("an optimizer's plain state alone, in another order")
def _optimizer_alone(pick: Pick, root: Path) -> str:
    names = [f"net{i}" for i in range(pick.integer(1, 3))]
    orders = [_shuffled(pick, len(names)) for _ in "ab"]
    saved, loaded = Job(names, orders[0], True), Job(names, orders[1], True)
    paddle_file = bool(pick.integer(0, 1))
    if paddle_file:
        paddle.save(saved.optimizer.state_dict(), str(root / "x.pdopt"))
    else:
        fc.save_state_dict(saved.plain()["optimizer"], root / "x")
    target = pick.choice(
        [
            lambda: loaded.plain()["optimizer"],
            lambda: loaded.optimizer.sharded_state_dict(loaded.net.sharded_state_dict()),
        ]
    )
    error = refused(lambda: fc.load_state_dict(target(), root / ("x.pdopt" if paddle_file else "x")))
    return judged(error, loaded.moments(), saved.moments(), f"order {orders}")


@flow("another number of layers")
def _another_number(pick: Pick, root: Path) -> str:
    counts = pick.integer(1, 4), pick.integer(1, 4)
    saved, loaded = (Job([f"layers{i}" for i in range(n)], range(n), True) for n in counts)
    strict = pick.choice((True, "missing"))
    if pick.integer(0, 1):
        fc.save_state_dict(saved.shards(), root / "x")
        error = refused(lambda: fc.load_state_dict(loaded.shards(), root / "x", strict=strict))
    else:
        with fc.CheckpointManager(root / "run", preemption_signals=()) as manager:
            manager.save(1, model=saved.net, optimizer=saved.optimizer)
            error = refused(lambda: manager.restore(model=loaded.net, optimizer=loaded.optimizer))
    if error is None and counts[0] > counts[1]:
        # Fewer layers here: what nobody asks for is left, and said.
        wanted = {k: v for k, v in saved.weights().items() if k in loaded.weights()}
        return judged(None, loaded.weights(), wanted, f"layers {counts}")
    return judged(error, loaded.weights(), saved.weights(), f"layers {counts}", may_fail=counts[0] != counts[1])


@flow("two optimizers of networks with the same raw names")
def _same_names(pick: Pick, root: Path) -> str:
    jobs = {name: Job(["net"], [0], True) for name in ("actor", "critic")}
    for i, job in enumerate(jobs.values()):
        job.net.net.weight.set_value(job.net.net.weight + i)
        for table in job.optimizer._accumulators.values():
            for state in table.values():
                state.set_value(state + i)
    both = paddle.nn.Layer()
    for name, job in jobs.items():
        both.add_sublayer(name, job.net)

    def state() -> dict[str, Any]:
        model = both.sharded_state_dict()
        found = dict(model)
        for job in jobs.values():
            found.update(job.optimizer.sharded_state_dict(model))
        return found

    error = refused(lambda: fc.save_state_dict(state(), root / "x"))
    if error is not None:
        return "error"
    wanted = {name: (job.weights(), job.moments()) for name, job in jobs.items()}
    for job in jobs.values():
        for tensor in (
            *job.net.parameters(),
            *(t for table in job.optimizer._accumulators.values() for t in table.values()),
        ):
            tensor.set_value(paddle.zeros_like(tensor))
    error = refused(lambda: fc.load_state_dict(state(), root / "x"))
    return judged(error, {n: (j.weights(), j.moments()) for n, j in jobs.items()}, wanted, "two optimizers")


@flow("codes of quantised weights")
def _codes(pick: Pick, root: Path) -> str:
    kind = pick.choice(("float8_e4m3fn", "int8", "uint8", "int32", "float16"))
    codes = (np.arange(32).reshape(8, 4) % 7).astype(getattr(ml_dtypes, kind, kind))
    tensors = {"lin.weight": codes}
    scale = pick.choice(
        (None, "lin.weight_scale_inv", "lin.weight_scale", "lin.SCB", "lin.weight.absmax", "lin.scales")
    )
    if scale is not None:
        tensors[scale] = np.full((8, 1) if "scale" in scale else (8,), 0.01, np.float32)
    config = bool(pick.integer(0, 3) == 0)
    root.joinpath("hf").mkdir()
    native = bool(pick.integer(0, 1)) and not config
    if native:
        fc.save_state_dict(dict(tensors), root / "hf")
    else:
        write_safetensors(root / "hf" / "model.safetensors", tensors)
    if config:
        (root / "hf" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    target = {"lin.weight": np.full((8, 4), -1, np.float32)}
    error = refused(lambda: fc.load_state_dict(target, root / "hf", dtype="cast", strict="missing"))
    coded = kind != "float16" and (scale is not None or config or (kind.startswith("float8") and not native))
    if coded and error is None:
        raise Finding(f"codes of {kind} beside {scale}, config {config}, became weights")
    return judged(error, target["lin.weight"].tolist(), codes.astype(np.float32).tolist(), kind, may_fail=coded)


_CODES = {"float8_e4m3fn": "F8_E4M3", "int8": "I8", "uint8": "U8", "int32": "I32", "float16": "F16", "float32": "F32",
          "float8_e5m2": "F8_E5M2"}  # fmt: skip


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": _CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _schedules() -> list[Callable[[], Any]]:
    lr = paddle.optimizer.lr
    return [
        lambda: lr.CosineAnnealingDecay(0.1, 100),
        lambda: lr.StepDecay(0.1, 7),
        lambda: lr.LinearWarmup(lr.CosineAnnealingDecay(0.1, 100), 5, 0.0, 0.1),
        lambda: lr.NoamDecay(64, 10),
    ]


class Scaler:
    """Stands for Paddle's GradScaler, which is disabled on a CPU."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


@flow("a schedule or a scaler is left out, or another")
def _schedule(pick: Pick, root: Path) -> str:
    makes = [*_schedules(), lambda: 0.1]
    first, second = pick.choice(makes), pick.choice(makes)
    one, two = first(), second()
    saved, loaded = Job(["net"], [0], True, one), Job(["net"], [0], True, two)
    scaler = Scaler(2.0 ** pick.integer(3, 12)) if pick.integer(0, 1) else None
    if hasattr(one, "step"):
        for _ in range(pick.integer(1, 9)):
            one.step()
    else:
        saved.optimizer.set_lr(0.001 * pick.integer(1, 9))
    given = {"lr_scheduler": one} if hasattr(one, "step") else {}
    asked = {"lr_scheduler": two} if hasattr(two, "step") and pick.integer(0, 3) else {}
    fresh = Scaler(4.0) if pick.integer(0, 1) else None
    with fc.CheckpointManager(root / "run", preemption_signals=()) as manager:
        manager.save(1, model=saved.net, optimizer=saved.optimizer, scaler=scaler, **given)
        error = refused(lambda: manager.restore(model=loaded.net, optimizer=loaded.optimizer, scaler=fresh, **asked))
    if error is not None:
        same = type(one) is type(two) and bool(given) == bool(asked) and (scaler is None) == (fresh is None)
        return judged(error, None, None, "", may_fail=not same)
    if scaler is not None and (fresh is None or fresh.scale != scaler.scale):
        raise Finding("the scaler starts over, and nothing says so")
    return judged(None, loaded.optimizer.get_lr(), saved.optimizer.get_lr(), f"rate of {type(one)} in {type(two)}")


@flow("the remedy is followed")
def _remedy(pick: Pick, root: Path) -> str:
    """A target of another shape or type; the statement or option that the error names; then what it has to hold."""
    shape = tuple(pick.integer(2, 6) for _ in range(pick.integer(1, 3)))
    whole = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    kind = pick.choice(("transposed", "longer", "shorter", "flat", "type", "name"))
    wanted, other = whole, {}
    if kind == "transposed":
        wanted = whole.T
        other["w"] = np.full(wanted.shape, -1, np.float32)
    elif kind in ("longer", "shorter"):
        grown = list(shape)
        grown[pick.integer(0, len(shape) - 1)] += pick.integer(1, 2) if kind == "longer" else -1
        wanted = np.full(grown, -1, np.float32)
        common = tuple(slice(0, min(a, b)) for a, b in zip(shape, grown))
        other["w"] = wanted.copy()
        wanted[common] = whole[common]
    elif kind == "flat":
        wanted = whole.reshape(-1)
        other["w"] = np.full(wanted.shape, -1, np.float32)
    elif kind == "type":
        wanted = whole.astype(pick.choice(("float64", "float16", "int32", ml_dtypes.bfloat16)))
        other["w"] = np.zeros_like(wanted)
    else:
        other["v"] = np.full(shape, -1, np.float32)
    fc.save_state_dict({"w": whole}, root / "x")
    error = refused(lambda: fc.load_state_dict(other, root / "x", strict="missing"))
    if error is None:
        (found,) = other.values()
        # A transposed shape may be the same one.
        if found.shape == whole.shape and found.tolist() == whole.tolist():
            return "equal"
        raise Finding(f"{kind}: loaded as {found.shape}")
    options: dict[str, Any] = {}
    advice = error.partition("Remedy (FC")[2]
    statement = re.search(r"the AOA statement '([^']*)'", advice)
    if statement is not None:
        options["aoa_config"] = {"aoa_statements": [statement[1]]}
    elif 'dtype="cast"' in advice:
        options["dtype"] = "cast"
    else:
        return "error"
    again = refused(lambda: fc.load_state_dict(other, root / "x", strict="missing", **options))
    (found,) = other.values()
    return judged(again, (found.shape, found.tolist()), (wanted.shape, wanted.tolist()), f"{kind}, {advice[:200]}")


@flow("shards beside plain states")
def _mixed(pick: Pick, root: Path) -> str:
    """A parameter in two halves, and its moments as plain tensors, each rank's own."""
    zeros = bool(pick.integer(0, 1))
    axis = pick.integer(0, 1)

    def state(rank: int, empty: bool) -> dict[str, Any]:
        with unique_name.guard():
            layer = paddle.nn.Linear(4, 4, bias_attr=False)
            optimizer = paddle.optimizer.AdamW(parameters=layer.parameters())
            (layer(paddle.ones([1, 4])).sum() * (0 if zeros or empty else rank + 1)).backward()
            optimizer.step()
        shape, offset = [4, 4], [0, 0]
        shape[axis], offset[axis] = 8, 4 * rank
        shard = fc.ShardedWeight("weight", layer.weight, (4, 4), tuple(shape), tuple(offset))
        return {"weight": shard, **{k: v for k, v in optimizer.state_dict().items() if hasattr(v, "numpy")}}

    states = [state(rank, False) for rank in range(2)]
    policy = pick.choice(("equal", "all", {"*moment*": "first"}))
    outcomes = SimulatedWorld(2).run_all(
        lambda comm: fc.save_state_dict(states[comm.rank], root / "x", comm, check_replicas=policy)
    )
    if all(isinstance(each, fc.CheckpointError) for each in outcomes):
        return "error"
    raise Finding(f"saved halves of states as wholes, with {policy}: {outcomes}")


@flow("a fork")
def _fork(pick: Pick, root: Path) -> str:
    """A child has the signals of a process without the library, whatever was called before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    signals, in_background = (signal.SIGTERM, signal.SIGUSR1), bool(pick.integer(0, 7) == 0)
    manager = fc.CheckpointManager(root / "run", preemption_signals=signals, async_save=in_background)
    if in_background or pick.integer(0, 1):
        manager.save(1, state={"w": np.ones(4, np.float32)})
    child = os.fork()
    if child == 0:
        inherited = [number for number, handler in before.items() if signal.getsignal(number) != handler]
        os._exit(len(inherited))
    status = os.waitpid(child, 0)[1]
    manager.close()
    if os.waitstatus_to_exitcode(status):
        raise Finding("a fork has the manager's handlers")
    return "equal"


VALUES = {
    "save_checkpoint_format": ("flex_checkpoint", "unified_checkpoint", "sharding_io"),
    "load_checkpoint_format": ("flex_checkpoint", "unified_checkpoint", "sharding_io"),
    "flex_strict": ("missing", "unexpected", "both", "none"),
    "flex_verify": ("read", "full", "off"),
    "flex_check_replicas": ("equal", "all", "close", "first"),
}


@flow("a flag of a trainer is mistyped")
def _mistyped(pick: Pick, root: Path) -> str:
    name = pick.choice(sorted(VALUES))
    right = pick.choice(VALUES[name])
    given, at = list(right), pick.integer(0, len(right) - 2)
    how = pick.integer(0, 4)
    if how == 0:
        given[at : at + 2] = given[at + 1], given[at]
    elif how == 1:
        del given[at]
    elif how == 2:
        given[at] = given[at].upper()
    elif how == 3:
        given.insert(at, " " if at == 0 else given[at])
    else:
        given = given[: at + 1]
    value = "".join(given)
    flags = {"save_checkpoint_format": "flex_checkpoint", "load_checkpoint_format": "flex_checkpoint", name: value}
    error = refused(lambda: options_of(SimpleNamespace(**flags)))
    # Policies of replicas may be written in any case.
    known = (value.lower() if name == "flex_check_replicas" else value) in VALUES[name]
    if error is None and not known:
        raise Finding(f"--{name} {value!r} passes")
    if error is not None and known:
        raise Finding(f"--{name} {value!r} is refused: {error}")
    return "equal" if error is None else "error"
