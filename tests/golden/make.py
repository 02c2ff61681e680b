"""Makes golden checkpoints: ``python -m tests.golden.make v2``. Those of a released format are never made again.

Values follow from key and position alone, by a rule that must not change; ``expected.json`` has their digests too.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np

from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.native import partitions
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import FusedAxis, ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld

HERE = Path(__file__).parent
Tensors = dict[str, tuple[str, tuple[int, ...]]]

SHARDED: Tensors = {
    "model.embed.weight": ("float32", (10, 6)),
    "model.norm.weight": ("bfloat16", (6,)),
    "model.out.weight": ("bfloat16", (6, 10)),
    "model.out.weight.w_0": ("float32", (6, 10)),
    "model.out.weight.moment1_0": ("float32", (6, 10)),
    "model.out.weight.beta1_pow_acc_0": ("float32", (1,)),
}
DTYPES_AND_SHAPES: Tensors = {
    **{f"of.{name}": (name, (3, 4)) for name in DTYPES},
    "scalar": ("float32", ()),
    "empty": ("int64", (0, 5)),
    "deep": ("uint8", (2, 1, 3, 1, 2)),
    "名前.with space#0": ("int32", (7,)),
    "__metadata__": ("int16", (2,)),
}


def value_of(key: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of a golden checkpoint: bytes of a chain of SHA-256 digests of its key."""
    itemsize = dtype_of(dtype).itemsize
    length = math.prod(shape) * itemsize
    data = b"".join(hashlib.sha256(f"{key} {block}".encode()).digest() for block in range(-(-length // 32)))[:length]
    raw = np.frombuffer(data, dtype=np.uint8)
    return (raw % 2 if dtype == "bool" else raw).view(dtype_of(dtype).numpy).reshape(shape).copy()


def whole(tensors: Tensors) -> dict[str, ShardedWeight]:
    return {
        key: ShardedWeight(key, value_of(key, dtype, shape), shape, shape, (0,) * len(shape))
        for key, (dtype, shape) in tensors.items()
    }


def tensor_parallel(position: int) -> dict[str, ShardedWeight]:
    """Two ranks: rows, columns, replicas, and optimizer state flattened and cut where a sharding optimizer cuts."""
    state = whole(SHARDED)
    embed, out = state["model.embed.weight"].local_tensor, state["model.out.weight"].local_tensor
    first = position * 5
    state["model.embed.weight"] = ShardedWeight("", embed[first : first + 5].copy(), (5, 6), (10, 6), (first, 0))
    columns = out[:, first : first + 5].copy()
    state["model.out.weight"] = ShardedWeight("", columns, (6, 5), (6, 10), (0, first))
    cut = (0, 17, 60)
    for name in ("model.out.weight.w_0", "model.out.weight.moment1_0"):
        begin, end = cut[position], cut[position + 1]
        flat = state[name].local_tensor.reshape(-1)[begin:end].copy()
        state[name] = ShardedWeight("", flat, (6, 10), (6, 10), (0, 0), True, slice(begin, end))
    return state


def make(root: Path) -> None:
    two = SimulatedWorld(2)
    two.run(lambda comm: save_state_dict(tensor_parallel(comm.position), root / "sharded", comm, unique_id=4))
    # Replaced once, so that files have a generation.
    for step in (1, 2):
        two.run(
            lambda comm, step=step: save_state_dict(
                tensor_parallel(comm.position), root / "replaced", comm, unique_id=0, step=step
            )
        )
    two.run(
        lambda comm: save_state_dict(
            tensor_parallel(comm.position), root / "replicas", comm, save_replicas=True, step=9
        )
    )
    SimulatedWorld(1).run(lambda comm: save_state_dict(whole(DTYPES_AND_SHAPES), root / "dtypes", comm))
    digests = {
        key: hashlib.sha256(value_of(key, *what).tobytes()).hexdigest()
        for key, what in {**SHARDED, **DTYPES_AND_SHAPES}.items()
    }
    (root / "expected.json").write_text(json.dumps(digests, indent=1, ensure_ascii=False) + "\n")


def make_extra_state(root: Path) -> None:
    """A run of one rank at step 3: scheduler, generators, position in the data, and values of the caller."""
    import paddle

    from paddle_flexckpt.run_state.extra_state import collect_extra_state

    scheduler = paddle.optimizer.lr.StepDecay(0.5, step_size=2, gamma=0.25)
    for _ in range(3):
        scheduler.step()
    extra = collect_extra_state(
        scheduler,
        step=3,
        dataloader={"epoch": 1, "seen": [4, 5]},
        ema=paddle.arange(3),
        tokens=10**12,
        note="é",
    )
    state = {**whole(SHARDED), **extra}
    SimulatedWorld(1).run(lambda comm: save_state_dict(state, root / "extra_state", comm, step=3))


FUSED: Tensors = {
    "mlp.gate_up.weight": ("float32", (6, 16)),
    "mlp.gate_up.weight.w_0": ("float32", (6, 16)),
    "attn.qkv.bias": ("bfloat16", (16,)),
    "mlp.down.weight": ("float32", (8, 6)),
}
RULES = {
    "mlp.gate_up.weight": FusedAxis(1, "fused_ffn"),
    "mlp.gate_up.weight.w_0": FusedAxis(1, "fused_ffn"),
    "attn.qkv.bias": FusedAxis(0, "fused_qkv_old, num_heads=4, num_key_value_groups=2"),
}


def fused_parts(key: str, degree: int) -> list[np.ndarray]:
    """What each tensor-parallel rank holds of a tensor of ``FUSED``, whose value is in natural order."""
    value, axis = value_of(key, *FUSED[key]), 0 if key == "mlp.down.weight" else -1
    cuts = {"attn.qkv.bias": [8, 12], "mlp.down.weight": []}.get(key, [8])
    parts = [np.split(component, degree, axis=axis) for component in np.split(value, cuts, axis=axis)]
    return [np.ascontiguousarray(np.concatenate([part[rank] for part in parts], axis)) for rank in range(degree)]


def fused(position: int, degree: int) -> dict[str, ShardedWeight]:
    state = {}
    for key, (_, shape) in FUSED.items():
        part, axis = fused_parts(key, degree)[position], 0 if key == "mlp.down.weight" else len(shape) - 1
        offset = [part.shape[axis] * position if i == axis else 0 for i in range(len(shape))]
        state[key] = ShardedWeight(key, part, part.shape, shape, offset, fused=RULES.get(key))
    return state


def make_fused(root: Path) -> None:
    """Version 2: fused parameters under two tensor-parallel ranks."""
    SimulatedWorld(2).run(lambda comm: save_state_dict(fused(comm.position, 2), root / "fused", comm, step=5))


PARTITIONED: Tensors = {f"layers.{i}.weight": ("float32", (4, 1 + i)) for i in range(12)} | {
    "名前": ("bfloat16", (7,)),
    "extra_state.common": ("uint8", (5,)),
    "extra_state.rng.rank0": ("uint8", (3,)),
}


def make_partitioned(root: Path) -> None:
    """Version 3: a manifest in partitions, of a save that has replaced another, by two ranks."""
    partitions.MOST_ROWS_IN_ONE_FILE, partitions.ROWS_PER_PARTITION = 5, 6
    state = {}
    for position in range(2):
        state[position] = whole(PARTITIONED)
        for key, (_, shape) in PARTITIONED.items():
            if key.startswith("layers."):
                part = value_of(key, *PARTITIONED[key])[position * 2 : position * 2 + 2].copy()
                state[position][key] = ShardedWeight(key, part, part.shape, shape, (position * 2, 0))
    for step in (1, 2):
        SimulatedWorld(2).run(
            lambda comm, step=step: save_state_dict(
                state[comm.position], root / "partitioned", comm, unique_id=0, step=step
            )
        )


if __name__ == "__main__":
    target = HERE / sys.argv[1]
    if target.exists():
        raise SystemExit(f"{target} is there: golden checkpoints are made once")
    if sys.argv[1] == "v1":
        make(target)
        make_extra_state(target)
    elif sys.argv[1] == "v2":
        make_fused(target)
    else:
        make_partitioned(target)
    print(f"made {target}")
