"""What the first save of a very large job costs one of its ranks, where each key is planned by one rank. Simulated.

Two jobs, of which no process is started. In the first, ``ranks / replicas`` tensor-parallel ranks cut every tensor by
rows, and ``replicas`` ranks hold each cut. The rank that plans the most keys runs the library's own code: it gets what
all others would send, and every byte that would reach it is counted, those that it passes on among them. The second is
a mixture of experts; every rank's shards are described, and some of the ranks plan.

    python -m benchmarks.spread_scale                     # 10,000 ranks x 3,000 tensors x 8; 61 layers x 256 experts
    python -m benchmarks.spread_scale --ranks 64 --tensors 50 --replicas 4 --layers 2 --experts 8
"""

from __future__ import annotations

import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from benchmarks.harness import MIB, Row, arguments, finish, row
from benchmarks.plan_scale import ROWS_PER_RANK, build_catalog
from paddle_flexckpt.catalog import group_replicas
from paddle_flexckpt.catalog.key_rows import decode_rows, encode_rows
from paddle_flexckpt.catalog.wire import join
from paddle_flexckpt.memory.replica_digests import DIGEST
from paddle_flexckpt.native.checksums import BLOCK_BYTES
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from paddle_flexckpt.planning.holder_sets import HolderSets, SharedLines, share_out
from paddle_flexckpt.planning.layouts import Layout, Model, ModelTensor
from paddle_flexckpt.planning.strategy import Strategy
from paddle_flexckpt.planning.write_plan import lay_lines
from paddle_flexckpt.ranks.communicator import Communicator, SoloCommunicator
from paddle_flexckpt.saving.partition_writers import encode_part
from paddle_flexckpt.saving.planners import Planners, RankSummary, planner_of
from paddle_flexckpt.saving.replica_checks import Replicas
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.saving.save_plan import SavePlan, assign, encode_assignments, report_fields
from paddle_flexckpt.transfer.agreement import check_heads

# What the coordinator is told of a partition.
DESCRIPTION_BYTES = 52
# A letter's head in the host channel, a digest, and the path of a directory that a rank may tell.
LETTER_BYTES, DIGEST_BYTES, PATH = 16, DIGEST.itemsize, "/mnt/shared/job/checkpoints/step-00001000"
CONTEXT = "cannot save"


class OneOfMany(Communicator):
    """One rank, to which others have said what they say already."""

    def __init__(self, world: int, position: int) -> None:
        super().__init__(tuple(range(world)), position)
        self.letters: list[tuple[dict[int, bytes], dict[int, bytes]]] = []

    def _all_gather(self, payload: bytes) -> list[bytes]:
        raise NotImplementedError

    def _all_to_all(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        notes, received = self.letters.pop(0)
        notes = {**notes, **({self.position: note} if note[:1] == b"-" else {})}
        own = {self.position: payloads[self.position]} if self.position in payloads else {}
        return notes, dict(sorted({**received, **own}.items()))


def arriving(place: int, world: int, size: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> int:
    """Bytes of an all-to-all that reach one rank, those among them that it passes on.

    ``size`` gives the bytes of letters, by sender and addressee; 0 where there is none.
    """
    total, distance = 0, 1
    while distance < world:
        far = np.flatnonzero(np.arange(world) & distance)
        source = (place + distance + (far & (distance - 1))) % world
        letters = size(source, (source - far) % world)
        total += int((letters + LETTER_BYTES * (letters > 0)).sum())
        distance *= 2
    return total


def part_of(world: int, tensors: int, replicas: int, keys: np.ndarray, places: np.ndarray) -> dict[int, bytes]:
    """What some ranks tell the planner of some keys."""
    cuts = world // replicas
    whole = build_catalog(replicas, tensors, replicas).take(keys)
    whole = replace(whole, key=np.arange(len(keys), dtype=np.int32), keys=tuple(whole.keys[key] for key in keys))
    global_shape, offset = whole.global_shape.copy(), whole.offset.copy()
    global_shape[:, 0] = cuts * ROWS_PER_RANK
    messages = {}
    for place in places.tolist():
        offset = offset.copy()
        offset[:, 0] = place % cuts * ROWS_PER_RANK
        own = replace(whole, global_shape=global_shape, offset=offset)
        messages[place] = encode_rows(own, np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.int64))[0]
    return messages


def replicas_of(comm, catalog, groups) -> Replicas:
    """Return the replicas of a save with the default options."""
    return Replicas(comm, {}, catalog, groups, np.zeros(len(catalog), dtype=np.uint8), True, CONTEXT)


def rows_of_writers(plan: SavePlan) -> int:
    """Bytes in which a rank tells what it has written to the writers of partitions."""
    items = replace(plan.file.catalog, files=("",))
    sums = np.zeros(int((-(-items.byte_length // BLOCK_BYTES)).sum()), dtype=np.uint64)
    part = Manifest.of_save(SaveInfo("", 0, 1), items, sums, {"": 0})
    return sum(map(len, encode_part(part, plan.partitions).values()))


def measure_busiest(ranks: int, tensors: int, replicas: int) -> dict[str, float]:
    """The first save of a job with tensors cut by rows, as the rank finds it that plans the most keys."""
    if min(ranks, tensors, replicas) < 1 or ranks % replicas:
        raise ValueError(f"{ranks} ranks cannot hold {replicas} replicas of each shard of {tensors} tensors")
    cuts, places = ranks // replicas, np.arange(ranks)
    own = build_catalog(replicas, tensors, replicas).take(np.arange(tensors))
    planner = planner_of(own.keys, ranks)
    keys_of = np.bincount(planner, minlength=ranks)
    place = int(np.argmax(keys_of))
    columns = own.shape[:, 1]
    own = replace(own, global_shape=np.stack([np.full(tensors, cuts * ROWS_PER_RANK), columns], axis=1))
    own = replace(own, offset=np.stack([np.full(tensors, place % cuts * ROWS_PER_RANK), 0 * columns], axis=1))
    own = replace(own, rank=np.full(tensors, place, dtype=np.int32))
    comm, received = OneOfMany(ranks, place), {}

    # What all ranks say first.
    said = RankSummary(bytes(16), b"null", PATH.encode(), b"[]", tensors, 1, True)
    heads = [said.encode(SaveOptions().encode("save_state_dict"))] * ranks
    received["agree"] = (ranks - 1) * (1 + len(heads[0]))

    # Rows: what all ranks tell this planner.
    rows = part_of(ranks, tensors, replicas, np.flatnonzero(planner == place), places)
    a_row = len(rows[place]) / keys_of[place]
    received["rows"] = arriving(place, ranks, lambda _, to: keys_of[to] * a_row)
    del rows[place]

    # Lines: all planners lay some of their keys on the line of each set of replicas.
    length = columns * ROWS_PER_RANK * 4
    of_planner = np.bincount(planner, length, ranks).astype(np.int64)
    sets = HolderSets(
        np.arange(ranks).reshape(replicas, cuts).T.reshape(-1), np.arange(0, ranks + 1, replicas, dtype=np.int64)
    )
    table = SharedLines(sets, np.full(cuts, length.sum()))
    told = {owner: b"+" + note for owner, note in table.ask().items()}
    owners, an_entry = np.bincount([*told], minlength=ranks), len(next(iter(told.values())))
    busy = of_planner > 0
    one_set = HolderSets(sets.members[sets.start[place % cuts] :][:replicas], np.asarray([0, replicas]))
    asked = {}
    for each in np.flatnonzero(busy).tolist():
        (asked[each],) = SharedLines(one_set, of_planner[each : each + 1]).ask().values()
    received["lines"] = arriving(place, ranks, lambda source, to: an_entry * busy[source] * (owners[to] > 0))
    before = np.cumsum(of_planner) - of_planner
    answers = {owner: np.full(owners[owner], before[place]).astype("<i8").tobytes() for owner in told}
    received["answers"] = arriving(place, ranks, lambda source, to: 8 * busy[to] * (owners[source] > 0))
    received["answers"] += sum(map(len, told.values())) + LETTER_BYTES * len(told)

    # Items: what all planners tell this rank.
    share = share_out(table._sets, np.full(cuts, length.sum()), ranks)[place % cuts * replicas :][:replicas]
    dealt, loads, noted = {}, np.zeros(replicas), {}
    counts = np.full(ranks, tensors, dtype=np.int64)
    for each in np.flatnonzero(busy).tolist():
        messages = part_of(ranks, tensors, replicas, np.flatnonzero(planner == each), one_set.members)
        part = decode_rows(messages, comm.ranks, np.cumsum(counts) - counts)
        lines = lay_lines(part.catalog, group_replicas(part.catalog), part.place)
        items = lines.cut(share, before=before[each : each + 1])
        # All sets of replicas are alike.
        noted[each] = b"+" + struct.pack("<QQ", len(items.row) * cuts, items.bytes_in(part.catalog) * cuts)
        loads += np.bincount(part.place[items.row] // cuts, (items.stop - items.start) * 4, replicas)
        if each != place:
            compared = replicas_of(comm, part.catalog, lines.groups).beside(items, turn=0)
            dealt[each] = encode_assignments({place: assign(part, items, compared)[place]}, each)[place]
    an_item = np.zeros(ranks)
    an_item[list(dealt)] = list(map(len, dealt.values()))
    received["items"] = arriving(place, ranks, lambda source, _: an_item[source])
    received["items"] += sum(map(len, noted.values())) + LETTER_BYTES * len(noted)

    # What all say when they have written.
    counted = [join((bytes(56), bytes(24))) for _ in places]
    received["write"] = (ranks - 1) * (1 + len(counted[0])) + LETTER_BYTES * ranks
    # A sample of each shard, and a writer's and a neighbour's stretch of what all replicas write together.
    a_key = 1 + 2 / replicas
    received["write"] += arriving(place, ranks, lambda _, to: (keys_of[to] * a_key).astype(np.int64) * DIGEST_BYTES)
    received["outcome"] = 2 * 8 * 2 * int(np.ceil(np.log2(ranks)))

    def save() -> SavePlan:
        comm.letters = [({}, rows), ({}, asked), (told, answers), (noted, dealt)]
        agreed = [RankSummary.decode(*fields) for fields in zip(*check_heads(heads, CONTEXT, comm.ranks))]
        planners = Planners(comm, own, np.zeros(tensors, dtype=np.int64), agreed, CONTEXT, "")
        planners.inspect()
        return planners.plan(replicas_of(comm, planners.rows.catalog, planners.groups), None, False, turn=0)

    def after(plan: SavePlan) -> None:
        of_rank = np.bincount(plan.catalog.rank[plan.compared.row], minlength=ranks)
        digests = [bytes(DIGEST_BYTES * count) for count in of_rank.tolist()]
        replicas_of(comm, plan.catalog, plan.groups).compare(plan.compared, digests)
        report_fields([plan.encode_report(0.0, 0.0)] * ranks, plan, "write")

    begin = time.process_time()
    plan = save()
    planned = time.process_time()
    # Rows with their checksums, to those who write the partitions of their keys: of each rank as many as of this one.
    own_rows = rows_of_writers(plan)
    writers = plan.partitions
    received["write"] += arriving(place, ranks, lambda _, to: -(-own_rows * (to < writers) // writers))
    received["outcome"] += arriving(place, ranks, lambda source, to: DESCRIPTION_BYTES * (source < writers) * (to == 0))
    after(plan)
    compared = time.process_time()
    tracemalloc.start()
    after(save())
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    total = sum(received.values())
    return {
        "ranks": ranks,
        "shards": ranks * tensors,
        "planned_keys": int(keys_of[place]),
        "planned_rows": len(plan.catalog),
        "received_mib": total / MIB,
        **{f"received_{name}_mib": each / MIB for name, each in received.items()},
        "memory_mib": (memory + total) / MIB,
        "plan_seconds": planned - begin,
        "compare_seconds": compared - planned,
        "imbalance": float(loads.max() / loads.mean()),
        "written_of_unique": float(loads.sum() / length.sum()),
        "items": len(plan.file.catalog),
        "partitions": writers,
    }


def experts(layers: int, count: int) -> Model:
    """A mixture of experts in bfloat16: its matrices, and the states of AdamW with master weights."""
    tensors = []
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for part in ("q_a", "q_b", "kv_a", "kv_b", "o"):
            key = f"{name}.self_attn.{part}_proj.weight"
            tensors.append(ModelTensor(key, (1536, 7168), "bfloat16", None, (layer,)))
        tensors.append(ModelTensor(f"{name}.input_layernorm.weight", (7168,), "bfloat16", None, (layer,)))
        for expert in range(count):
            for part in ("gate", "up", "down"):
                key = f"{name}.mlp.experts.{expert}.{part}_proj.weight"
                tensors.append(ModelTensor(key, (7168, 2048), "bfloat16", None, (layer,), expert=(expert, count)))
    return Model(tuple(tensors), layers)


def measure_experts(layers: int, count: int, strategy: Strategy, sample: int = 16) -> dict[str, float]:
    """The first save of a mixture of experts: every rank's shards are described, and a sample of the ranks plans."""
    layout, world = Layout(experts(layers, count), strategy), strategy.ranks
    planner = planner_of(layout.keys, world)
    letters: list[dict[int, bytes]] = [{} for _ in range(world)]
    counts, owned = np.zeros(world, dtype=np.int64), np.zeros(world, dtype=np.int64)
    for rank in range(world):
        catalog = layout.catalog(rank)
        counts[rank], owned[rank] = len(catalog), catalog.byte_length.sum()
        for to, message in encode_rows(catalog, np.zeros(len(catalog), dtype=np.int64), planner).items():
            letters[to][rank] = message
    before = np.cumsum(counts) - counts
    rows_of = np.zeros(world, dtype=np.int64)
    laid, boxes, seconds = [], [{} for _ in range(world)], np.zeros(world)
    for place in range(world):
        begin = time.process_time()
        rows = decode_rows(letters[place], range(world), before)
        lines = lay_lines(rows.catalog, group_replicas(rows.catalog), rows.place)
        shared = SharedLines(lines.sets, lines.amount)
        asked = shared.ask()
        seconds[place] = time.process_time() - begin
        rows_of[place] = len(rows.catalog)
        laid.append((rows, lines, shared))
        for owner, message in asked.items():
            boxes[owner][place] = message
    told, answers = {}, [{} for _ in range(world)]
    for owner in range(world):
        begin = time.process_time()
        note, replies = SharedLines.answer(boxes[owner])
        seconds[owner] += time.process_time() - begin
        told.update({owner: note} if note else {})
        for place, reply in replies.items():
            answers[place][owner] = reply
    some = np.unique([int(np.argmax(rows_of)), *np.linspace(0, world - 1, sample).astype(int)])
    for place in some.tolist():
        rows, lines, shared = laid[place]
        begin = time.process_time()
        share, lower = shared.share(told, answers[place], world)
        items = lines.cut(share, before=lower)
        assign(rows, items, replicas_of(SoloCommunicator(), rows.catalog, lines.groups).beside(items, turn=0))
        seconds[place] += time.process_time() - begin
    return {
        "ranks": world,
        "keys": len(layout.keys),
        "shards": int(counts.sum()),
        "most_rows": int(rows_of.max()),
        "plan_seconds": float(seconds[some].max()),
    }


def rows_from(busiest: dict[str, float], moe: dict[str, float]) -> list[Row]:
    """Rows of the table, with bounds for the jobs that have some."""
    case = f"first save, {busiest['ranks']:,} ranks x {busiest['shards'] // busiest['ranks']:,} shards, simulated"
    is_bound = busiest["ranks"] == 10_000 and busiest["shards"] == 30_000_000
    bounds = ("<= 16", "<= 64", "<= 1", "<= 1.02", "<= 1.002") if is_bound else ("",) * 5
    large = f"plan of a rank, {moe['ranks']:,} ranks, {moe['shards']:,} shards of {moe['keys']:,} tensors, simulated"
    return [
        row(f"received by the busiest rank: {case}", busiest["received_mib"], bounds[0], "MiB"),
        row(f"memory of the busiest rank: {case}", busiest["memory_mib"], bounds[1], "MiB"),
        row(f"planning of the busiest rank: {case}", busiest["plan_seconds"], bounds[2], "s"),
        row(f"max / mean bytes of a group: {case}", busiest["imbalance"], bounds[3]),
        row(f"bytes written / unique of a group: {case}", busiest["written_of_unique"], bounds[4]),
        row(large, moe["plan_seconds"], "<= 1" if moe["ranks"] == 2048 else "", "s"),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, pairs=1)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--tensors", type=int, default=3000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", type=int, default=256)
    options = parser.parse_args(argv)
    large = options.layers >= 16
    strategy = Strategy(dp=128, pp=16, ep=64) if large else Strategy(dp=8, pp=2, ep=4)
    try:
        busiest = measure_busiest(options.ranks, options.tensors, options.replicas)
    except ValueError as error:
        parser.error(str(error))
    moe = measure_experts(options.layers, options.experts, strategy)
    for name, value in (*busiest.items(), *((f"moe_{name}", value) for name, value in moe.items())):
        print(f"  {name:24}{value:>16,.3f}" if isinstance(value, float) else f"  {name:24}{value:>16,}")
    finish(options, rows_from(busiest, moe), busiest=busiest, experts=moe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
