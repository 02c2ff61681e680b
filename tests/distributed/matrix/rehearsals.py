"""Compares what is said without ranks with what real ranks describe and count, for every pair of strategies.

``python -m tests.distributed.matrix.rehearsals``. Each strategy begins one job, which describes itself, saves, and then
loads what every strategy of its model has saved, directly and co-operatively. Strategies are those of fleet, experts
whose optimizer is sharded, and those of semi-automatic parallelism.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.communication import group_communicators as communicator
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.local import LocalOutputFile
from paddle_flexckpt.memory.state import open_state
from paddle_flexckpt.native import checksums, data_file
from paddle_flexckpt.planning.job_layout import JobLayout
from paddle_flexckpt.planning.layouts import Layout
from paddle_flexckpt.planning.strategy import parse_strategy
from paddle_flexckpt.testing import World
from paddle_flexckpt.tools.rehearsal import rehearse
from paddle_flexckpt.tools.save_rehearsal import rehearse_save
from tests.distributed.matrix import jobs
from tests.distributed.matrix.strategies import MODELS, REHEARSED, STRATEGIES
from tests.distributed.test_layouts import model_of, rows_of, text_of
from tests.semi_auto import layouts as semi_auto

JOBS = "tests.distributed.matrix.rehearsals"
SHARED = ("bytes_read", "reads", "bytes_received", "bytes_sent")
SAVED = ("keys", "items", "total_bytes", "held_bytes", "imbalance")
ALL = (*MODELS, *semi_auto.MODELS)
COUNTS = ("bytes_needed", "bytes_read", "reads", "peak_scratch_bytes", "missing", "unexpected")


def begin(strategy: str, model: str, salt: str) -> Any:
    """Return the state of a fresh job."""
    if model in semi_auto.MODELS:
        return semi_auto.state_of(strategy, model)
    return jobs.begin(strategy, model, salt).state()


def save(strategy: str, model: str, folder: str) -> dict[str, Any]:
    """Save the state of a job, untrained; return what this rank describes, and what it counts of the save."""
    state = begin(strategy, model, "saved")
    writes, hashed, write_many, hash_block = [], [], LocalOutputFile.write_many, checksums.hash_block

    def write(self: LocalOutputFile, parts: Sequence[Any]) -> None:
        writes.append(self._path)
        write_many(self, parts)

    def note(block: Any) -> int:
        hashed.append(memoryview(block).nbytes)
        return hash_block(block)

    # Another strategy may have had the same layout: a plan that is kept compares other replicas than a new one.
    communicator._group_plans.cache_clear()
    with (
        mock.patch.object(LocalOutputFile, "write_many", write),
        mock.patch.object(checksums, "hash_block", note),
        mock.patch.object(data_file, "hash_block", note),
    ):
        report = fc.save_state_dict(state, folder)
    manifest = SourceDirectory(folder).read_manifest(None)
    counted = {name: getattr(report, name) for name in SAVED}
    counted.update(bytes_written=report.bytes_written, hashed_bytes=sum(hashed), files=len(manifest.files))
    counted.update(writes=sum(path.endswith(".safetensors") for path in writes), token=manifest.save_token)
    return {"rows": rows_of(open_state(state, dist.get_rank()).catalog), "counted": counted}


def load(strategy: str, model: str, folders: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Return what this rank counts for each checkpoint: where it reads for itself, and where one reads for all."""
    state = begin(strategy, model, "other")
    found = {}
    for name, folder in folders.items():
        reports = [fc.load_state_dict(state, folder, comm_method=way).as_dict() for way in ("direct", "cooperative")]
        found[name] = [{name: each[name] for name in names} for each, names in zip(reports, (COUNTS, SHARED))]
        if not all(weight.local_tensor.is_contiguous() for weight in state.values()):
            # Paddle leaves some parameters of half precision strided in memory, which no layout says.
            found[name][0]["reads"] = None
    return found


def layout_of(strategy: Any, model: str) -> JobLayout:
    """Return the layout of a strategy, as a user would ask for it."""
    if model in semi_auto.MODELS:
        return semi_auto.layout_of(strategy, model)
    return Layout(model_of(strategy, model), parse_strategy(text_of(strategy)))


def undescribed(layout: JobLayout, described: list[dict[str, Any]]) -> list[str]:
    """Return where a layout differs from what the ranks of a job describe."""
    wrong = []
    for rank, real in enumerate(described):
        said = rows_of(layout.catalog(rank))
        wrong += [f"rank {rank}: {key}" for key in sorted({*said, *real}) if said.get(key) != real.get(key)]
        wrong += [f"rank {rank}: the order of its shards"] if [*said] != [*real] else []
    return wrong


def miscounted(path: str, layout: JobLayout, counted: list[list[dict[str, Any]]]) -> list[str]:
    """Return where a rehearsal differs from what the ranks of a job count."""
    report = rehearse(path, layout, cooperative=True)
    if report.error:
        return [report.error]
    wrong = []
    for each in report.ranks:
        for rank in each.ranks:
            said = {**each.__dict__, "peak_scratch_bytes": each.scratch_bytes}
            said.update(missing=[], unexpected=report.unexpected)
            said["reads"] = None if counted[rank][0]["reads"] is None else said["reads"]
            both = [({name: said[name] for name in COUNTS}, counted[rank][0])]
            if len(counted) > 1:  # one rank alone reads directly
                both.append(({name: report.cooperative[name][rank] for name in SHARED}, counted[rank][1]))
            wrong += [f"rank {rank}: {ours} instead of {real}" for ours, real in both if ours != real]
    seen = sorted(rank for each in report.ranks for rank in each.ranks)
    return wrong if seen == list(range(len(counted))) else [*wrong, f"ranks {seen}"]


def missaved(layout: JobLayout, counted: list[dict[str, Any]]) -> list[str]:
    """Return where a rehearsal of a save differs from what the ranks of a job count."""
    report = rehearse_save(layout, turn=int(counted[0]["token"][-8:], 16))
    wrong = []
    for rank, each in enumerate(counted):
        said: dict[str, Any] = {name: getattr(report, name) for name in (*SAVED, "files")}
        said.update({name: report.ranks[name][rank] for name in ("bytes_written", "hashed_bytes", "writes")})
        wrong += [
            f"rank {rank}: {name}={said[name]} instead of {each[name]}" for name in said if said[name] != each[name]
        ]
    return wrong


def strategies_of(model: str) -> list[Any]:
    """Return the strategies that a model is compared under."""
    if model in semi_auto.MODELS:
        return semi_auto.MODELS[model][1]
    return [each for each in (*STRATEGIES, *REHEARSED) if model in each.models]


def run(world: Callable[[int], World], folder: Path, model: str) -> list[dict[str, Any]]:
    """Compare all strategies of a model, printing a line for each; return what is wrong by pair."""
    known = strategies_of(model)
    folders = {each.name: str(folder / model / each.name) for each in known}
    results = []
    for each in known:
        ranks = layout_of(each, model).strategy.ranks
        saved = world(ranks).run(f"{JOBS}:save", strategy=each.name, model=model, folder=folders[each.name])
        layout = layout_of(each, model)
        wrong = undescribed(layout, [rank["rows"] for rank in saved])
        wrong += missaved(layout, [rank["counted"] for rank in saved])
        results.append({"model": model, "loaded": each.name, "saved": "", "wrong": wrong})
    for each in known:
        begun, layout = time.perf_counter(), layout_of(each, model)
        found = world(layout.strategy.ranks).run(f"{JOBS}:load", strategy=each.name, model=model, folders=folders)
        wrong_of = {saved: miscounted(path, layout, [rank[saved] for rank in found]) for saved, path in folders.items()}
        results += [
            {"model": model, "loaded": each.name, "saved": saved, "wrong": wrong} for saved, wrong in wrong_of.items()
        ]
        right = sum(not wrong for wrong in wrong_of.values())
        seconds = time.perf_counter() - begun
        print(f"{model:11s} {each.name:>19s}: {right} of {len(wrong_of)} pairs {seconds:5.1f} s", flush=True)
    return results


def main() -> int:
    """Compare all pairs of all models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--models", nargs="+", choices=ALL, default=ALL)
    args = parser.parse_args()
    worlds: dict[int, World] = {}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for model in args.models:
                results += run(lambda size: worlds.setdefault(size, World(size)), Path(folder), model)
        finally:
            for each in worlds.values():
                each.close()
    wrong = [result for result in results if result["wrong"]]
    for each in wrong:
        print(f"{each['model']} {each['saved'] or 'described'} -> {each['loaded']}: {each['wrong'][:3]}")
    pairs = sum(bool(result["saved"]) for result in results)
    print(f"{len(results) - pairs} layouts and their saves, and {pairs} pairs compared, {len(wrong)} differ")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
