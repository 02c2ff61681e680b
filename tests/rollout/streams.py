"""Models that change step by step, and how versions of them are published here."""

from __future__ import annotations

import numpy as np

from paddle_flexckpt.loading.weight_publisher import WeightPublisher
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.transfer.samples import cut, values_of

KINDS = {
    "m.a": ("bfloat16", (24, 40)),
    "m.b": ("float32", (7, 5, 3)),
    "m.c": ("int64", (9,)),
    "m.d": ("uint8", (3,)),
    "m.none": ("float32", (0, 4)),
    "m.one": ("float32", ()),
    "z.last": ("bfloat16", (50, 16)),
}


def first() -> dict[str, np.ndarray]:
    return values_of(KINDS)


def bytes_of(values: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in values.items()}


def step(values: dict[str, np.ndarray], rng: np.random.Generator, most: int = 3) -> dict[str, np.ndarray]:
    """Return the next values: some bytes of some tensors differ."""
    new = {name: value.copy() for name, value in values.items()}
    for name in rng.choice(sorted(new), rng.integers(0, most + 1), replace=False):
        data = new[name].reshape(-1).view(np.uint8)
        if data.size:
            at = rng.choice(data.size, max(1, data.size // 50), replace=False)
            data[at] ^= rng.integers(1, 255, len(at), dtype=np.uint8)
    return new


def publish(root, values, ranks: int = 1, full: bool = False, **options):
    """Publish the next version by simulated ranks; return the report of each."""

    def job(comm):
        publisher = WeightPublisher(root, process_group=comm, **options)
        return publisher.publish(cut(values, comm.rank, ranks), full=full)

    return SimulatedWorld(ranks).run(job)


def publish_stream(root, count: int, seed: int = 0, ranks: int = 1, **options) -> list[dict[str, bytes]]:
    """Publish some versions; return the bytes of each by its number, of which 0 has none."""
    rng, values, history = np.random.default_rng(seed), first(), [dict[str, bytes]()]
    for _ in range(count):
        publish(root, values, ranks, **options)
        history.append(bytes_of(values))
        values = step(values, rng)
    return history
