"""How long planning takes, and how much memory, for a job of a thousand ranks.

The job: ``ranks / replicas`` tensor-parallel ranks cut every tensor by rows, and ``replicas`` data-parallel ranks hold
each cut. Its catalog has a row per rank and tensor. Validation, grouping, coverage and the write plan are what one save
pays when the layout is new; then one rank plans its read of the result.

    python benchmarks/plan_scale.py                       # 1,024 ranks x 1,000 tensors x 8 replicas: 1.02 M shards
    python benchmarks/plan_scale.py --ranks 10240 --tensors 400 --json result.json
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

# Rows that each tensor-parallel rank holds of every tensor.
ROWS_PER_RANK = 4


def peak_mb() -> float:
    """Peak resident memory of this process, in MB.

    ``ru_maxrss`` survives exec: in a child of a large process it is the parent's size. Linux's VmHWM does not.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)


def build_catalog(ranks: int, tensors: int, replicas: int):
    """The catalog of the whole job, its columns built directly; row ``rank * tensors + key``."""
    import numpy as np

    from paddle_flexckpt.catalog.table import NOT_FLATTENED, Catalog

    cuts = ranks // replicas
    items = ranks * tensors
    rank = np.repeat(np.arange(ranks, dtype=np.int32), tensors)
    key = np.tile(np.arange(tensors, dtype=np.int32), ranks)
    columns = (np.random.default_rng(0).integers(1, 64, tensors) * 16)[key]

    def boxes(first, second):
        out = np.empty((items, 2), dtype=np.int64)
        out[:, 0], out[:, 1] = first, second
        return out

    return Catalog(
        keys=tuple(f"layers.{i}.weight" for i in range(tensors)),
        dtypes=("float32",),
        files=(),
        key=key,
        dtype=np.zeros(items, dtype=np.int16),
        ndim=np.full(items, 2, dtype=np.int16),
        global_shape=boxes(cuts * ROWS_PER_RANK, columns),
        offset=boxes(rank % cuts * ROWS_PER_RANK, 0),
        shape=boxes(ROWS_PER_RANK, columns),
        flat_start=np.full(items, NOT_FLATTENED, dtype=np.int64),
        flat_stop=np.full(items, NOT_FLATTENED, dtype=np.int64),
        rank=rank,
        file=np.full(items, -1, dtype=np.int32),
        byte_offset=np.zeros(items, dtype=np.int64),
    )


def measure(ranks: int, tensors: int, replicas: int, empty_mb: float | None = None) -> dict[str, float]:
    """Plans the save of the job and one rank's load; returns what came out and what it took.

    Args:
        ranks: Ranks of the job, a multiple of ``replicas``.
        tensors: Tensors of the model.
        replicas: Ranks that hold each shard.
        empty_mb: Peak memory of the interpreter before numpy was imported.
    """
    if min(ranks, tensors, replicas) < 1 or ranks % replicas:
        raise ValueError(f"{ranks} ranks cannot hold {replicas} replicas of each shard of {tensors} tensors")
    empty_mb = peak_mb() if empty_mb is None else empty_mb

    from paddle_flexckpt.catalog import group_replicas, validate_coverage, validate_shards
    from paddle_flexckpt.planning import ShardMatcher, plan_read, plan_write

    seconds: dict[str, float] = {}

    def timed(name, function, *args, **kwargs):
        start = time.perf_counter()
        out = function(*args, **kwargs)
        seconds[name] = time.perf_counter() - start
        return out

    catalog = build_catalog(ranks, tensors, replicas)
    catalog_mb = peak_mb()
    problems = timed("validate", validate_shards, catalog)
    groups = timed("group", group_replicas, catalog)
    coverage = timed("coverage", validate_coverage, catalog, groups)
    plan = timed("write_plan", plan_write, catalog, "{}_0.safetensors".format, groups=groups)
    total = sum(seconds.values())
    save_mb = peak_mb()
    matcher = timed("index", ShardMatcher, plan.catalog)
    mine = catalog.take(catalog.rank == ranks // 2)
    read = timed("read_plan", plan_read, matcher, mine)
    return {
        "ranks": ranks,
        "tensors": tensors,
        "replicas": replicas,
        "items": len(catalog),
        "distinct": len(groups),
        "problems": len(problems) + len(coverage.problems),
        "overlaps": len(coverage.overlaps),
        "written_items": len(plan.catalog),
        "written_bytes": plan.total_bytes,
        "distinct_bytes": int(catalog.byte_length.sum()) // replicas,
        "imbalance": plan.imbalance,
        "read_pieces": len(read.pieces),
        "read_bytes": read.needed_bytes,
        "target_bytes": int(mine.byte_length.sum()),
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "total_seconds": total,
        "catalog_mb": catalog_mb - empty_mb,
        "save_peak_mb": save_mb - empty_mb,
        "peak_mb": peak_mb() - empty_mb,
    }


def report(result: dict[str, float]) -> str:
    """The result in words."""
    lines = [
        f"{result['items']:,} shards: {result['ranks']:,} ranks x {result['tensors']:,} tensors, "
        f"{result['replicas']} replicas each",
        f"  {result['problems']} problems, {result['overlaps']} overlaps, {result['distinct']:,} distinct shards, "
        f"{result['written_items']:,} items written, imbalance {result['imbalance']:.4f}",
    ]
    for name in ("validate", "group", "coverage", "write_plan", "total"):
        lines.append(f"  {name:<12}{result[f'{name}_seconds']:8.3f} s")
    lines += [
        f"  peak RSS {result['save_peak_mb']:.0f} MB above the empty interpreter, "
        f"of which imports and catalog {result['catalog_mb']:.0f} MB",
        f"  one rank's read: {result['read_pieces']:,} pieces, {result['read_bytes']:,} bytes; "
        f"index {result['index_seconds']:.3f} s, plan {result['read_plan_seconds']:.3f} s, "
        f"peak {result['peak_mb']:.0f} MB",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    empty_mb = peak_mb()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")
    options = parser.parse_args(argv)
    try:
        result = measure(options.ranks, options.tensors, options.replicas, empty_mb)
    except ValueError as error:
        parser.error(str(error))
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    # Found when the package is not installed: the repository is the parent of this directory.
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
