"""How long planning takes, and how much memory, for a job of a thousand ranks.

The job: ``ranks / replicas`` tensor-parallel ranks cut every tensor by rows, and ``replicas`` data-parallel ranks hold
each cut. Its catalog has a row per rank and tensor. Validation, grouping, coverage and the write plan are what one save
pays when the layout is new; then one rank plans its read of the result.

    python -m benchmarks.plan_scale                       # 1,024 and 10,240 ranks x 1,000 tensors x 8 replicas
    python -m benchmarks.plan_scale --ranks 10240 --tensors 400 --json result.json
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from benchmarks.harness import Row, arguments, finish, row

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
    from paddle_flexckpt.planning.exchange_plan import plan_read
    from paddle_flexckpt.planning.matching import ShardMatcher
    from paddle_flexckpt.planning.write_plan import plan_write

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


#: Seconds that planning may take, by shards.
BOUNDS = {1_024_000: "<= 0.5", 10_240_000: "<= 6"}


def rows_of(result: dict[str, float]) -> list[Row]:
    """Tell times and memory of one job."""
    case = f"{result['items']:,} shards ({result['ranks']:,} ranks)"
    return [
        row(f"validate and plan a save: {case}", result["total_seconds"], BOUNDS.get(result["items"], ""), unit="s"),
        row(f"index and plan one rank's read: {case}", result["index_seconds"] + result["read_plan_seconds"], unit="s"),
        row(f"memory of validating and planning a save: {case}", result["save_peak_mb"], unit="MB"),
    ]


def main(argv: list[str] | None = None) -> int:
    empty_mb = peak_mb()
    parser = arguments(__doc__, pairs=1)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1024, 10240], help="smallest first: peaks are compared"
    )
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=8)
    options = parser.parse_args(argv)
    try:
        jobs = [measure(ranks, options.tensors, options.replicas, empty_mb) for ranks in options.ranks]
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(map(report, jobs)))
    finish(options, [row for job in jobs for row in rows_of(job)], jobs=jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
