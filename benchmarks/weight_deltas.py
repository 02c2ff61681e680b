"""Time a version of weights as a delta, of which 1 % of the elements have changed, against a copy of the model.

    python -m benchmarks.weight_deltas [--megabytes 512] [--rounds 7] [--directory /dev/shm]

Each round makes the next delta and applies it to a local copy as ``flexckpt apply`` does. It also replaces another copy
of the file by a copy that one thread makes (``cp``), and copies the bytes into new memory, with the large pages that
numpy asks for (``memcpy``). Ratios are those of one round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from paddle_flexckpt.loading.weight_publisher import WeightPublisher
from paddle_flexckpt.media.local import OutputParts
from paddle_flexckpt.rollout.local_copy import apply_version

ENCODINGS = ("xor", "overwrite")


def change(tensor: np.ndarray, rng: np.random.Generator) -> int:
    """Change the low bits of 1 % of the elements, as a small step of training does; return how many."""
    chosen = rng.choice(tensor.size, tensor.size // 100, replace=False)
    tensor.view(np.uint16)[chosen] ^= rng.integers(1, 16, len(chosen), dtype=np.uint16)
    return len(chosen)


def copy_seconds(data: np.ndarray, path: Path) -> tuple[float, float]:
    """Return the seconds of a copy to a new file that replaces an old one, and to new memory."""
    begin = time.perf_counter()
    with OutputParts(f"{path}.tmp") as output:
        output.write_at(memoryview(data), 0)
    os.replace(f"{path}.tmp", path)
    between = time.perf_counter()
    made = np.empty_like(data)
    np.copyto(made, data)
    end = time.perf_counter()
    return between - begin, end - between


def run(megabytes: int, rounds: int, directory: str | None) -> dict[str, dict[str, float]]:
    """Return, by encoding, the median ratios and the bytes of a changed element."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    elements = (megabytes << 20) // 16
    model = {
        f"w{i}": (rng.standard_normal(elements) / 50).astype(ml_dtypes.bfloat16).reshape(-1, 1024) for i in range(8)
    }
    found = {}
    for encoding in ENCODINGS:
        with tempfile.TemporaryDirectory(dir=directory) as place:
            root, local = Path(place, "versions"), Path(place, "local")
            publisher = WeightPublisher(root, full_every=rounds + 2, encoding=encoding, process_group="self")
            publisher.publish(model)
            apply_version(root, local)
            rows: list[tuple[float, ...]] = []
            for _ in range(rounds):
                changed = sum(change(tensor.reshape(-1), rng) for tensor in model.values())
                begin = time.perf_counter()
                report = publisher.publish(model)
                published = time.perf_counter()
                applied = apply_version(root, local)
                end = time.perf_counter()
                data = np.fromfile(next(local.glob("*.safetensors")), dtype=np.uint8)
                cp, memcpy = copy_seconds(data, Path(place, "copy"))
                apply = end - published
                assert applied.tensors == len(model)
                speeds = (data.nbytes / each / 1e9 for each in (apply, cp, memcpy))
                ratios = cp / apply, memcpy / apply, (published - begin) / memcpy
                rows.append((*ratios, report.total_bytes / changed, *speeds))
            names = ("apply to cp", "apply to memcpy", "publish in memcpys", "bytes an element")
            names += ("apply GB/s", "cp GB/s", "memcpy GB/s")
            found[encoding] = {name: statistics.median(each) for name, each in zip(names, zip(*rows))}
            found[encoding]["least apply to memcpy"] = min(row[1] for row in rows)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", default="/dev/shm")
    options = parser.parse_args(argv)
    found = run(options.megabytes, options.rounds, options.directory)
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
