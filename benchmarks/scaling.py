"""What a save and a load cost up to 100,000 ranks and 100 TB: simulated, with the real planner and protocol.

No job is run. `planning.layouts` describes what the ranks of a strategy have, and the library's own functions encode
it, plan it, and write and read its manifest. Sizes and counts are those of real jobs; times are CPU times of this
machine. Ranks are sampled where a job has more than ``--sample``.

    python -m benchmarks.scaling                      # all tables of benchmarks/results/scaling.md
    python -m benchmarks.scaling --tables jobs plans --jobs dense-70b:tp=8,pp=8,dp=16 --json result.json
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, arguments, finish, row
from benchmarks.spread_scale import measure_busiest
from paddle_flexckpt.catalog.key_rows import decode_rows
from paddle_flexckpt.foreign.paddle_files import PaddleMetadata
from paddle_flexckpt.native.checksums import BLOCK_BYTES

# The states of AdamW make four tensors of each weight, and two of one number.
JOBS = (
    # Replicas by data parallelism, states cut by sharding V2, experts spread: 1,024 to 98,304 ranks.
    "dense-70b:tp=8,pp=8,dp=16",
    "dense-70b:tp=8,pp=8,sharding=v2:16",
    "dense-70b:tp=8,pp=16,sharding=v2:80",
    "moe-671b:pp=61,ep=32,dp=64",
    "moe-671b:pp=61,ep=32,dp=256",
    "moe-7t:pp=64,ep=128,dp=256",
    "moe-7t:pp=64,ep=128,dp=1536",
)
LOADS = (
    "dense-70b:tp=8,pp=8,dp=16",
    "dense-70b:tp=8,pp=8,sharding=v2:16",
    "dense-70b:tp=8,pp=8,dp=16>tp=4,pp=16,sharding=v2:16",
    "moe-671b:pp=61,ep=32,dp=64",
    "moe-671b:pp=61,ep=32,dp=64>pp=61,ep=8,dp=16",
)
ROWS = (1_000_000, 10_000_000)
FIRST_SAVES = (1_024, 10_000)
# Tensors of many shards and of few, each of one rank: 1,000,000 shards in all.
OPENINGS = tuple(
    (shards, ranks) for shards in (1_024, 4) for ranks in (0, 8, 64, 1_024, 16_384)[: 5 if shards < 9 else 4]
)
TABLES = ("jobs", "first_saves", "plans", "manifests", "openings", "loads")
_TOKEN = "0123456789abcdef" * 2


def dense(layers: int, hidden: int, inner: int, kv: int, vocabulary: int):
    """A dense decoder with grouped attention, cut as Paddle's tensor-parallel layers are."""
    from paddle_flexckpt.planning.layouts import Model, ModelTensor

    tensors = [ModelTensor("model.embed_tokens.weight", (vocabulary, hidden), "bfloat16", 0, (0,))]
    for layer in range(1, layers + 1):
        name, here = f"model.layers.{layer - 1}", (layer,)
        for each, shape, axis in (
            ("self_attn.q_proj", (hidden, hidden), 1),
            ("self_attn.k_proj", (hidden, kv), 1),
            ("self_attn.v_proj", (hidden, kv), 1),
            ("self_attn.o_proj", (hidden, hidden), 0),
            ("mlp.gate_proj", (hidden, inner), 1),
            ("mlp.up_proj", (hidden, inner), 1),
            ("mlp.down_proj", (inner, hidden), 0),
            ("input_layernorm", (hidden,), None),
            ("post_attention_layernorm", (hidden,), None),
        ):
            tensors.append(ModelTensor(f"{name}.{each}.weight", shape, "bfloat16", axis, here))
    end = (layers + 1,)
    tensors.append(ModelTensor("model.norm.weight", (hidden,), "bfloat16", None, end))
    tensors.append(ModelTensor("lm_head.weight", (hidden, vocabulary), "bfloat16", 1, end))
    return Model(tuple(tensors), layers + 2, frozenset(range(1, layers + 1)))


def moe(layers: int, experts: int, hidden: int, inner: int, vocabulary: int):
    """A decoder whose layers have experts of three weights each, and latent attention."""
    from paddle_flexckpt.planning.layouts import Model, ModelTensor

    tensors = [ModelTensor("model.embed_tokens.weight", (vocabulary, hidden), "bfloat16", None, (0,))]
    for layer in range(1, layers + 1):
        name, here = f"model.layers.{layer - 1}", (layer,)
        for each, shape in (
            ("self_attn.q_a_proj", (hidden, 1536)),
            ("self_attn.q_b_proj", (1536, 24576)),
            ("self_attn.kv_a_proj_with_mqa", (hidden, 576)),
            ("self_attn.kv_b_proj", (512, 32768)),
            ("self_attn.o_proj", (16384, hidden)),
            ("mlp.gate", (hidden, experts)),
            ("mlp.shared_experts.gate_proj", (hidden, inner)),
            ("mlp.shared_experts.up_proj", (hidden, inner)),
            ("mlp.shared_experts.down_proj", (inner, hidden)),
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ):
            tensors.append(ModelTensor(f"{name}.{each}.weight", shape, "bfloat16", None, here))
        for expert in range(experts):
            for each, shape in (("gate", (hidden, inner)), ("up", (hidden, inner)), ("down", (inner, hidden))):
                one = f"{name}.mlp.experts.{expert}.{each}_proj.weight"
                tensors.append(ModelTensor(one, shape, "bfloat16", None, here, expert=(expert, experts)))
    end = (layers + 1,)
    tensors.append(ModelTensor("lm_head.weight", (hidden, vocabulary), "bfloat16", None, end))
    return Model(tuple(tensors), layers + 2, frozenset(range(1, layers + 1)))


MODELS: dict[str, Callable[[], Any]] = {
    "dense-70b": lambda: dense(80, 8192, 28672, 1024, 128256),
    "moe-671b": lambda: moe(61, 256, 7168, 2048, 129280),
    # Ten times the weights: 100 TB with all states.
    "moe-7t": lambda: moe(64, 1024, 12288, 2880, 129280),
    "tiny": lambda: dense(4, 64, 128, 32, 160),
    "tiny-moe": lambda: moe(4, 8, 64, 32, 160),
}


def layout_of(job: str):
    """The layout of a job, ``model:strategy``."""
    from paddle_flexckpt.planning.layouts import Layout
    from paddle_flexckpt.planning.strategy import parse_strategy

    model, _, strategy = job.partition(":")
    return Layout(MODELS[model](), parse_strategy(strategy))


def cost(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a function returns, the seconds that it takes, and the MiB that it has at most; it runs twice."""
    begin = time.process_time()
    work()
    seconds = time.process_time() - begin
    tracemalloc.start()
    try:
        result = work()
        return result, seconds, tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def sampled(ranks: int, most: int) -> list[int]:
    """Ranks spread evenly over a job, so many at most."""
    count = min(ranks, most)
    return [ranks * each // count + (ranks // count) // 2 * (count < ranks) for each in range(count)]


def measure_job(job: str, sample: int) -> dict[str, Any]:
    """What ranks describe: rows, their bytes as messages to those that plan them, and the state's size."""
    import numpy as np

    from paddle_flexckpt.catalog.key_rows import encode_rows
    from paddle_flexckpt.native.partitions import partition_of

    layout = layout_of(job)
    ranks = layout.strategy.ranks
    planner = partition_of(layout.keys, ranks)
    rows, whole, sent, messages = [], [], [], []
    for rank in sampled(ranks, sample):
        catalog = layout.catalog(rank)
        flags = np.zeros(len(catalog), dtype=np.int64)
        rows.append(len(catalog))
        whole.append(len(encode_rows(catalog, flags, np.zeros(len(layout.keys), dtype=np.int64))[0]))
        told = encode_rows(catalog, flags, planner)
        sent.append(sum(map(len, told.values())))
        messages.append(len(told))
    mean = lambda values: float(np.mean(values))  # noqa: E731
    return {
        "job": job,
        "ranks": ranks,
        "sampled": len(rows),
        "keys": len(layout.keys),
        "rows_per_rank": mean(rows),
        "most_rows": max(rows),
        "rows": mean(rows) * ranks,
        "state_bytes": state_bytes(layout),
        "bytes_to_all": mean(whole) * ranks,
        "bytes_to_planners": mean(sent),
        "messages_per_rank": mean(messages),
    }


def state_bytes(layout) -> int:
    """Bytes of every tensor and state of a job, each once."""
    from math import prod

    from paddle_flexckpt.catalog import dtype_of

    model, total = layout._model, 0
    for each in model.tensors:
        size = prod(each.shape)
        total += size * dtype_of(each.dtype).itemsize
        total += sum((1 if state.is_scalar else size) * 4 for state in model.states if each.is_trained)
    return total


def shares(job: str, planner: int):
    """The messages of all ranks to one planner, by place, and how many shards each rank has before.

    A rank's shards of some tensors do not depend on the other tensors, unless buffers of several are cut (sharding V2):
    so the other tensors are left out.
    """
    import numpy as np

    from paddle_flexckpt.catalog.key_rows import encode_rows
    from paddle_flexckpt.native.partitions import partition_of
    from paddle_flexckpt.planning.layouts import Layout

    layout = layout_of(job)
    model, ranks = layout._model, layout.strategy.ranks
    if layout.strategy.kind == "none":
        mine = partition_of(layout.keys, ranks) == planner
        wanted = np.flatnonzero(mine.reshape(-1, len(model.tensors)).any(axis=0)).tolist()
        layout = Layout(replace(model, tensors=tuple(model.tensors[each] for each in wanted)), layout.strategy)
    part = (partition_of(layout.keys, ranks) != planner).astype(np.int64)
    messages, counts = {}, np.zeros(ranks, dtype=np.int64)
    for rank in range(ranks):
        catalog = layout.catalog(rank)
        counts[rank] = len(catalog)
        told = encode_rows(catalog, np.zeros(len(catalog), dtype=np.int64), part)
        if 0 in told:
            messages[rank] = told[0]
    return messages, np.cumsum(counts) - counts


def plan_rows(messages, ranks: int, before):
    """What a planner does with what ranks tell it: check the shards of its keys, and plan who writes what."""
    from paddle_flexckpt.catalog import group_replicas, validate_coverage, validate_shards
    from paddle_flexckpt.planning.write_plan import plan_write

    catalog = decode_rows(messages, range(ranks), before).catalog
    groups = group_replicas(catalog)
    problems = validate_shards(catalog) + validate_coverage(catalog, groups).problems
    if problems:
        raise ValueError(problems[:3])
    return plan_write(catalog, "{}_0.safetensors".format, groups=groups)


def busiest_planner(layout) -> int:
    """The rank that gets most shards to plan, as far as some ranks tell."""
    import numpy as np

    from paddle_flexckpt.native.partitions import partition_of

    ranks = layout.strategy.ranks
    holders = np.ones(len(layout.keys), dtype=np.int64)
    for rank in sampled(ranks, 64):
        holders += np.bincount(layout.catalog(rank).key, minlength=len(holders))
    return int(np.bincount(partition_of(layout.keys, ranks), weights=holders, minlength=ranks).argmax())


def measure_plan(job: str, most_rows: int) -> dict[str, Any]:
    """What planning takes: by every rank for all keys, and by the busiest rank for its own."""
    import numpy as np

    from paddle_flexckpt.catalog import group_replicas
    from paddle_flexckpt.catalog.key_rows import encode_rows
    from paddle_flexckpt.planning.holder_sets import least_peak
    from paddle_flexckpt.planning.write_plan import lay_lines

    layout = layout_of(job)
    ranks = layout.strategy.ranks
    rows = int(np.mean([len(layout.catalog(rank)) for rank in sampled(ranks, 4)]) * ranks)
    messages, before = shares(job, busiest_planner(layout))
    _, seconds, mib = cost(lambda: plan_rows(messages, ranks, before))
    result: dict[str, Any] = {
        "job": job,
        "ranks": ranks,
        "rows": rows,
        "own_received": sum(map(len, messages.values())),
        "own_messages": len(messages),
        "own_seconds": seconds,
        "own_mib": mib,
        "all_seconds": None,
    }
    if rows > most_rows:
        return result
    catalogs = [layout.catalog(rank) for rank in range(ranks)]
    counts = np.asarray([len(each) for each in catalogs], dtype=np.int64)
    one = np.zeros(len(layout.keys), dtype=np.int64)
    told = {rank: encode_rows(each, one[each.key], one)[0] for rank, each in enumerate(catalogs)}
    before = np.cumsum(counts) - counts
    plan, seconds, mib = cost(lambda: plan_rows(told, ranks, before))
    catalog = decode_rows(told, range(ranks), before).catalog
    lines = lay_lines(catalog, group_replicas(catalog), catalog.rank.astype(np.int64))
    return result | {
        "rows": int(counts.sum()),
        "all_received": sum(map(len, told.values())),
        "all_seconds": seconds,
        "all_mib": mib,
        "files": len(plan.catalog.files),
        "written_rows": len(plan.catalog),
        "imbalance": plan.imbalance,
        "of_least": float(plan.rank_bytes.max() / least_peak(lines.sets, lines.amount, plan.rank_bytes)),
    }


def catalog_of_rows(rows: int, ranks: int = 1024):
    """Stored items of a job of ``ranks``: each tensor is cut by rows among all of them."""
    import numpy as np

    from benchmarks.plan_scale import build_catalog

    tensors = -(-rows // ranks)
    catalog = build_catalog(ranks, tensors, 1)
    length = catalog.byte_length.reshape(ranks, tensors)
    begin = (np.cumsum(length, axis=1) - length).reshape(-1)
    files = tuple(f"{rank}_0.safetensors" for rank in range(ranks))
    return replace(catalog, files=files, file=catalog.rank.copy(), byte_offset=begin)


def manifest_of_rows(rows: int, ranks: int = 1024):
    """A manifest of so many rows, with a checksum for each, of a job of ``ranks``."""
    import numpy as np

    from paddle_flexckpt.native.manifest import Manifest, SaveInfo

    catalog = catalog_of_rows(rows, ranks)
    sums = np.random.default_rng(0).integers(0, 1 << 63, len(catalog)).astype(np.uint64)
    sizes = dict.fromkeys(catalog.files, int((catalog.byte_offset + catalog.byte_length).max()))
    return Manifest.of_save(SaveInfo(_TOKEN, 0, len(catalog.files), 1), catalog, sums, sizes)


def measure_manifest(rows: int, where: Path, tensors: int = 20) -> dict[str, Any]:
    """A manifest in one file and in partitions: its size, and what opening it takes, and one tensor, and all."""
    import statistics

    from paddle_flexckpt.foreign.paddle_files import open_to_save
    from paddle_flexckpt.native.directory import CheckpointDirectory
    from paddle_flexckpt.native.manifest import Manifest
    from paddle_flexckpt.native.partition_files import read_rows
    from paddle_flexckpt.native.save_names import SaveNames

    def timed(work: Callable[[], Any]) -> tuple[Any, float]:
        begin = time.process_time()
        result = work()
        return result, time.process_time() - begin

    manifest = manifest_of_rows(rows)
    data, encode = timed(manifest.encode)
    again, one = timed(lambda: Manifest.decode(data, "0.manifest"))
    result = {
        "rows": len(manifest.catalog),
        "one_file_bytes": len(data),
        "one_file_write": encode,
        "one_file_open": one,
    }
    del again
    if rows <= PaddleMetadata.most_rows:
        companion, seconds = timed(lambda: PaddleMetadata().encode(manifest))
        result |= {"companion_bytes": len(companion), "companion_write": seconds}
    with tempfile.TemporaryDirectory(dir=where) as path:
        directory, reader = open_to_save(path), CheckpointDirectory(path)
        written, seconds = timed(lambda: directory.write_partitions(SaveNames(0, _TOKEN), manifest))
        head = written.encode()
        (Path(path) / "0.manifest").write_bytes(head)
        opened = [timed(lambda: reader.read_committed(0, ()))[1] for _ in range(5)]
        known = reader.read_committed(0, ())
        names = manifest.catalog.keys[:: max(1, len(manifest.catalog.keys) // tensors)]
        one_tensor = [timed(lambda name=name: read_rows(reader.backend, known, [name]))[1] for name in names]
        _, everything = timed(lambda: reader.read_committed(0))
        size = len(head) + sum(each.nbytes for each in written.partitions)
    with tempfile.TemporaryDirectory(dir=where) as path:
        result |= measure_writers(manifest, Path(path))
        made = lambda: Manifest.of_partitions(manifest.info, manifest.sizes, written.partitions)  # noqa: E731
        result["coordinator_seconds"] = timed(lambda: made().encode())[1]
    return result | {
        "partitions": len(written.partitions),
        "bytes": size,
        "write": seconds,
        "head_bytes": len(head),
        "open": statistics.median(opened),
        "one_tensor": statistics.median(one_tensor),
        "all": everything,
    }


def measure_opening(case: tuple[int, int], where: Path, rows: int = 1_000_000) -> dict[str, Any]:
    """What one rank of a load reads and holds of a manifest in partitions.

    ``case`` has the shards of each tensor, and the number of ranks, each of which loads as many tensors; 0: one rank
    that knows all rows, as each did before.
    """
    import numpy as np

    from paddle_flexckpt.foreign.paddle_files import open_to_save
    from paddle_flexckpt.loading.direct_files import DirectFiles
    from paddle_flexckpt.media.local import LocalBackend
    from paddle_flexckpt.native.save_names import SaveNames
    from paddle_flexckpt.ranks.communicator import SoloCommunicator
    from paddle_flexckpt.transfer.files import Files
    from paddle_flexckpt.transfer.options import LoadOptions
    from paddle_flexckpt.transfer.targets import Memory, Targets

    shards, ranks = case
    manifest = manifest_of_rows(rows, shards)
    comm = SoloCommunicator()
    comm.ranks, comm.position = tuple(range(max(ranks, 1))), ranks // 2
    keys = np.arange(len(manifest.catalog.keys)) % max(ranks, 1) == comm.position
    first = np.unique(manifest.catalog.key, return_index=True)[1][keys]
    mine = manifest.catalog.take(first).compact()
    nothing = ((),) * len(mine.keys)
    targets = Targets(mine, nothing, nothing, np.zeros((len(mine), 2), dtype=np.int64), Memory())
    read: list[int] = []
    with tempfile.TemporaryDirectory(dir=where) as path:
        written = open_to_save(path).write_partitions(SaveNames(0, _TOKEN), manifest)
        (Path(path) / "0.manifest").write_bytes(written.encode())
        files = DirectFiles(comm, path, LoadOptions(), "", "") if ranks else Files(path, LoadOptions())

        def load() -> None:
            read.clear()
            files.open()
            files.want(targets)

        original = LocalBackend.read
        LocalBackend.read = lambda self, *names: read.append(len(data := original(self, *names))) or data
        try:
            with files.closing:
                _, seconds, mib = cost(load)
        finally:
            LocalBackend.read = original
    return {
        "rows": len(manifest.catalog),
        "shards": shards,
        "ranks": ranks,
        "keys": len(mine),
        "partitions": len(written.partitions),
        "partitions_read": len(read) - 1,
        "bytes": sum(read),
        "held": len(files.catalog),
        "seconds": seconds,
        "mib": mib,
    }


def measure_writers(manifest: Any, path: Path, sample: int = 8) -> dict[str, Any]:
    """The same partitions, written by the ranks: what some of them are told, and what that takes them."""
    import numpy as np

    from benchmarks.spread_scale import OneOfMany
    from paddle_flexckpt.foreign.paddle_files import open_to_save
    from paddle_flexckpt.native.partitions import partitions_for
    from paddle_flexckpt.native.save_names import SaveNames
    from paddle_flexckpt.saving.partition_writers import PartitionWriter

    catalog, names = manifest.catalog, SaveNames(0, _TOKEN)
    ranks, count = len(catalog.files), partitions_for(len(catalog))
    directory, some = open_to_save(path), range(min(ranks, sample))
    order = np.argsort(catalog.file, kind="stable")
    edges = np.searchsorted(catalog.file[order], np.arange(ranks + 1)).tolist()
    said, seconds = [], np.zeros(ranks)
    received: list[dict[int, bytes]] = [{} for _ in some]
    writers = [PartitionWriter(OneOfMany(ranks, place), directory, names, count) for place in range(ranks)]
    for place, writer in enumerate(writers):
        rows = manifest.take(order[edges[place] : edges[place + 1]])
        own = replace(rows.catalog, files=(catalog.files[place],), file=np.zeros(len(rows.catalog), dtype=np.int32))
        part = replace(rows, catalog=own, file_bytes=manifest.file_bytes[[place]])
        begin = time.process_time()
        told, messages = writer.send(part)
        seconds[place] = time.process_time() - begin
        said.append(told)
        for each in some:
            if each in messages:
                received[each][place] = messages[each]
    for place in some:
        before = names.data_file((place - 1) % ranks)
        with open(path / before, "wb") as file:
            file.write(_TOKEN.encode())
            file.truncate(int(manifest.file_bytes[(place - 1) % ranks]))
        begin = time.process_time()
        writers[place].write(said, received[place])
        seconds[place] += time.process_time() - begin
    return {
        "writers": min(ranks, count),
        "writer_received": max(sum(map(len, each.values())) for each in received),
        "writer_seconds": float(seconds[: len(some)].max()),
    }


def measure_load(job: str) -> dict[str, Any]:
    """What one rank's load asks for; ``job`` is the job that saved, and after ``>`` the strategy that loads.

    Of the manifest the rank has the rows of its keys alone.
    """
    import numpy as np

    from paddle_flexckpt.catalog import concat
    from paddle_flexckpt.native.partitions import ROWS_PER_PARTITION, partition_of
    from paddle_flexckpt.planning.exchange_plan import plan_read
    from paddle_flexckpt.planning.matching import ShardMatcher
    from paddle_flexckpt.planning.write_plan import plan_write

    saved, _, loads = job.partition(">")
    layout = layout_of(saved)
    loading = layout_of(f"{saved.partition(':')[0]}:{loads}") if loads else layout
    mine = loading.catalog(loading.strategy.ranks // 2)
    keys = np.unique(mine.key)
    wanted = np.zeros(len(layout.keys), dtype=bool)
    wanted[keys] = True
    stored = [each.take(wanted[each.key]) for each in map(layout.catalog, range(layout.strategy.ranks))]
    plan = plan_write(concat([each for each in stored if len(each)]), "{}_0.safetensors".format)
    read, seconds, mib = cost(lambda: plan_read(ShardMatcher(plan.catalog), mine))
    # As many rows for each of the other keys.
    partitions = -(-len(plan.catalog) * len(layout.keys) // len(keys) // ROWS_PER_PARTITION)
    return {
        "job": job,
        "ranks": loading.strategy.ranks,
        "targets": len(mine),
        "pieces": len(read.pieces),
        "files": len(np.unique(plan.catalog.file[read.pieces.source])),
        "bytes": read.needed_bytes,
        "plan_seconds": seconds,
        "plan_mib": mib,
        "partitions": partitions,
        "partitions_of_keys": len(np.unique(partition_of([layout.keys[key] for key in keys.tolist()], partitions))),
    }


def measure_calls(ranks: tuple[int, int] = (4, 8)) -> dict[str, Any]:
    """Collectives and operations on files of the coordinator and of another rank, for two numbers of ranks."""
    import threading
    from collections import Counter
    from unittest import mock

    import numpy as np

    from paddle_flexckpt.loading.loader import load_state_dict
    from paddle_flexckpt.media.local import LocalBackend
    from paddle_flexckpt.saving import planners
    from paddle_flexckpt.saving.saver import save_state_dict
    from paddle_flexckpt.sharded_weight import ShardedWeight
    from paddle_flexckpt.testing.simulated import SimulatedWorld

    operations = ("open", "read", "create", "remove", "names", "sync")
    calls = (
        ("save", save_state_dict, planners.SPREAD_ROWS),
        ("save, keys spread", save_state_dict, 0),
        ("load", load_state_dict, 0),
    )
    counts: dict[str, Any] = {"ranks": ranks}
    for count in ranks:
        with tempfile.TemporaryDirectory() as path:
            for name, call, most in calls:
                done: Counter[tuple[int, str]] = Counter()
                places: dict[int, int] = {}

                def job(comm, call=call, count=count, path=path, done=done, places=places):
                    place = places[threading.get_ident()] = comm.position
                    state = {
                        f"w{i}": ShardedWeight("", np.ones((2, 3), np.float32), (2, 3), (2 * count, 3), (2 * place, 0))
                        for i in range(3)
                    }
                    for method in ("together", "trade"):
                        if hasattr(comm, method):
                            original = getattr(comm, method)
                            setattr(comm, method, _counted(original, lambda: done.update([(place, "collectives")])))
                    call(state, path, comm)

                with contextlib.ExitStack() as stack:
                    stack.enter_context(mock.patch.object(planners, "SPREAD_ROWS", most))
                    for each in operations:
                        original = getattr(LocalBackend, each)
                        note = lambda each=each, done=done, places=places: done.update(  # noqa: E731
                            [(places.get(threading.get_ident(), -1), each)]
                        )
                        stack.enter_context(mock.patch.object(LocalBackend, each, _counted(original, note)))
                    SimulatedWorld(count).run(job)
                for place, who in ((0, "coordinator"), (1, "rank")):
                    counts.setdefault(f"{name}_{who}_files", []).append(sum(done[place, each] for each in operations))
                counts.setdefault(f"{name}_collectives", []).append(done[0, "collectives"])
    return counts


def _counted(function: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        note()
        return function(*arguments, **options)

    return counted


def show_calls(found: dict[str, Any]) -> str:
    few, many = found["ranks"]

    def law(name: str) -> str:
        low, high = found[name]
        slope = (high - low) / (many - few)
        return f"{low - slope * few:g} + {slope:g} n" if slope else f"{low}"

    return table(
        ("n ranks", "collectives", "operations on files, the coordinator", "another rank"),
        [(name, *(law(f"{name}_{what}") for what in ("collectives", "coordinator_files", "rank_files")))
         for name in ("save", "save, keys spread", "load")],
    )  # fmt: skip


def _units(value: float, unit: str = "B") -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show_jobs(found: list[dict[str, Any]]) -> str:
    return table(
        ("job", "ranks", "keys", "state", "its checksums", "shards a rank", "shards of all", "said to all",
         "said to planners, a rank", "messages, a rank"),
        [(each["job"], f"{each['ranks']:,}", f"{each['keys']:,}", _units(each["state_bytes"]),
          _units(each["state_bytes"] / BLOCK_BYTES * 8),
          f"{each['rows_per_rank']:,.0f}", _units(each["rows"], ""), _units(each["bytes_to_all"]),
          _units(each["bytes_to_planners"]), f"{each['messages_per_rank']:,.0f}") for each in found],
    )  # fmt: skip


def show_plans(found: list[dict[str, Any]]) -> str:
    def alone(each: dict[str, Any]) -> tuple[str, ...]:
        if each["all_seconds"] is None:
            return ("-",) * 5
        return (
            f"{_units(each['all_received'])}, {each['all_seconds']:.2f} s, {each['all_mib']:.0f} MiB",
            f"{each['files']:,}",
            f"{each['written_rows']:,}",
            f"{each['imbalance']:.3f}",
            f"{each['of_least']:.3f}",
        )

    return table(
        ("job", "ranks", "shards", "its own keys: received", "messages", "s", "MiB", "every rank all keys", "files",
         "rows written", "most / mean bytes", "most / least possible"),
        [(each["job"], f"{each['ranks']:,}", _units(each["rows"], ""), _units(each["own_received"]),
          f"{each['own_messages']:,}", f"{each['own_seconds']:.3f}", f"{each['own_mib']:.1f}", *alone(each))
         for each in found],
    )  # fmt: skip


def show_manifests(found: list[dict[str, Any]]) -> str:
    return table(
        ("rows", "form", "files", "size", "write", "open", "one tensor", "all rows"),
        [line for each in found for line in (
            *([(f"{each['rows']:,}", "file for Paddle", "1", _units(each["companion_bytes"]),
                f"{each['companion_write']:.2f} s", "", "", "")] if "companion_bytes" in each else []),
            (f"{each['rows']:,}", "one file", "1", _units(each["one_file_bytes"]), f"{each['one_file_write']:.2f} s",
             f"{each['one_file_open']:.2f} s", f"{each['one_file_open']:.2f} s", f"{each['one_file_open']:.2f} s"),
            (f"{each['rows']:,}", "partitions", f"{each['partitions'] + 1:,}", _units(each["bytes"]),
             f"{each['write']:.2f} s", f"{each['open'] * 1e3:.1f} ms", f"{each['one_tensor'] * 1e3:.2f} ms",
             f"{each['all']:.2f} s"),
            (f"{each['rows']:,}", f"partitions, by {each['writers']:,} ranks", f"{each['partitions'] + 1:,}",
             _units(each["bytes"]), f"a rank {each['writer_seconds']:.2f} s, of {_units(each['writer_received'])}; "
             f"the coordinator {each['coordinator_seconds'] * 1e3:.1f} ms more", "", "", ""),
        )],
    )  # fmt: skip


def show_openings(found: list[dict[str, Any]]) -> str:
    return table(
        ("shards of a tensor", "ranks", "tensors of a rank", "partitions read", "bytes read", "rows held", "memory",
         "seconds"),
        [(f"{each['shards']:,}", f"{each['ranks']:,}" if each["ranks"] else "all rows", f"{each['keys']:,}",
          f"{each['partitions_read']:,} of {each['partitions']:,}", _units(each["bytes"]), f"{each['held']:,}",
          f"{each['mib']:.1f} MiB", f"{each['seconds']:.3f}") for each in found],
    )  # fmt: skip


def show_loads(found: list[dict[str, Any]]) -> str:
    return table(
        ("job", "ranks", "targets", "pieces", "data files", "read", "plan", "partitions of its keys"),
        [(each["job"], f"{each['ranks']:,}", f"{each['targets']:,}", f"{each['pieces']:,}", f"{each['files']:,}",
          _units(each["bytes"]), f"{each['plan_seconds']:.3f} s, {each['plan_mib']:.1f} MiB",
          f"{each['partitions_of_keys']:,} of {each['partitions']:,}") for each in found],
    )  # fmt: skip


def show_first_saves(found: list[dict[str, Any]]) -> str:
    names = ("agree", "rows", "lines", "answers", "items", "write")
    return table(
        ("ranks", "shards", "received", *(f"{name}" for name in names), "memory", "planning", "most / mean bytes"),
        [(f"{each['ranks']:,}", _units(each["shards"], ""), f"{each['received_mib']:.1f} MiB",
          *(f"{each[f'received_{name}_mib']:.2f}" for name in names), f"{each['memory_mib']:.1f} MiB",
          f"{each['plan_seconds']:.2f} s", f"{each['imbalance']:.3f}") for each in found],
    )  # fmt: skip


def bounds_of(manifests: list[dict[str, Any]]) -> list[Row]:
    """The bounds of a manifest of a million shards."""
    (found,) = manifests[:1] or [None]
    if found is None:
        return []
    case = f"manifest of {found['rows']:,} shards, simulated"
    is_bound = 1_000_000 <= found["rows"] < 1_010_000
    bounds = ("<= 40", "<= 500", "<= 2") if is_bound else ("",) * 3
    return [
        row(f"size: {case}", found["bytes"] / 1e6, bounds[0], "MB"),
        row(f"open: {case}", found["open"] * 1e3, bounds[1], "ms"),
        row(f"one tensor: {case}", found["one_tensor"] * 1e3, bounds[2], "ms"),
    ]


def _pair(text: str) -> tuple[int, int]:
    shards, ranks = map(int, text.split(","))
    return shards, ranks


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, pairs=1)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--jobs", nargs="+", default=JOBS, metavar="JOB", help=f"models: {', '.join(MODELS)}")
    parser.add_argument("--loads", nargs="+", default=LOADS, metavar="JOB", help="SAVED or SAVED>STRATEGY")
    parser.add_argument("--first-saves", nargs="+", type=int, default=FIRST_SAVES, metavar="RANKS")
    parser.add_argument("--tensors", type=int, default=3000, help="of each rank of these")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="rows of manifests")
    parser.add_argument("--openings", nargs="+", type=_pair, default=OPENINGS, metavar="SHARDS,RANKS")
    parser.add_argument("--sample", type=int, default=16, help="ranks of a job that are looked at, at most")
    parser.add_argument("--most", type=int, default=1_000_000, help="shards of a job that one process plans, at most")
    options = parser.parse_args(argv)
    measures: dict[str, tuple[Any, Callable[..., dict[str, Any]], Callable[..., str]]] = {
        "jobs": (options.jobs, lambda job: measure_job(job, options.sample), show_jobs),
        "first_saves": (
            options.first_saves,
            lambda ranks: measure_busiest(ranks, options.tensors, 8),
            show_first_saves,
        ),
        "plans": (options.jobs, lambda job: measure_plan(job, options.most), show_plans),
        "manifests": (options.rows, lambda rows: measure_manifest(rows, options.directory), show_manifests),
        "openings": (options.openings, lambda case: measure_opening(case, options.directory), show_openings),
        "loads": (options.loads, measure_load, show_loads),
    }
    results: dict[str, Any] = {"calls": measure_calls()}
    print(f"calls\n\n{show_calls(results['calls'])}")
    for name in options.tables:
        cases, measure, show = measures[name]
        results[name] = [measure(case) for case in cases]
        print(f"\n{name}\n\n{show(results[name])}", flush=True)
    finish(options, bounds_of(results.get("manifests", [])), **results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
