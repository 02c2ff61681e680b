"""A channel of real ranks, under several strategies, to an engine of two ranks: what ``publish`` writes, sent once."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
from paddle.distributed import fleet
from safetensors.numpy import load_file

import paddle_flexckpt as fc
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.rollout.authenticated import SECRET
from paddle_flexckpt.rollout.receiver import Receiver
from paddle_flexckpt.testing.cpu_world import init_fleet
from tests.rollout.stub_engine import StubEngine

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


DEGREES = {
    "tp2 v2": {"mp": 2, "sharding": 2, "split_param": True},
    "pp2": {"pp": 2},
    "stage3": {"sharding": 2},
    "tp2": {"mp": 2},
}


def build(strategy):
    """A model under a strategy."""
    init_fleet(**DEGREES[strategy])
    fc.install()
    model = layers(strategy)
    change(model, 0)
    return model


def layers(strategy):
    parallel = fleet.meta_parallel
    if strategy == "pp2":
        descriptions = [parallel.LayerDesc(paddle.nn.Linear, 8, 8) for _ in range(4)]
        return parallel.PipelineLayer(descriptions, num_stages=2, loss_fn=paddle.nn.MSELoss())
    if strategy == "stage3":
        model = paddle.nn.Sequential(paddle.nn.Linear(8, 64), paddle.nn.Linear(64, 8))
        optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
        return paddle.distributed.sharding.group_sharded_parallel(model, optimizer, "p_g_os", segment_size=1)[0]
    model = paddle.nn.LayerDict(
        {
            "up": parallel.ColumnParallelLinear(8, 12, has_bias=True, gather_output=True),
            "down": parallel.RowParallelLinear(12, 8, has_bias=True),
            "words": parallel.VocabParallelEmbedding(10, 8),
            "norm": paddle.nn.LayerNorm(8),
        }
    )
    # Its buffers become the parameters' memory.
    fleet.distributed_optimizer(paddle.optimizer.AdamW(0.01, parameters=model.parameters()))
    return model


def change(model, seed):
    """Give each parameter's memory other values, alike on ranks that have the same part."""
    for name, shard in sorted(model.sharded_state_dict().items()):
        rng = np.random.default_rng([seed, *name.encode(), *shard.global_offset, *_flat(shard)])
        tensor = shard.local_tensor
        tensor.set_value(rng.standard_normal(tensor.shape).astype(np.float32))


def _flat(shard):
    return [] if shard.flattened_range is None else [shard.flattened_range.start]


def write_base(strategy, directory, aoa_config):
    fc.publish(build(strategy), directory, aoa_config=aoa_config)


def push(strategy, directory, url, aoa_config, elsewhere=(), **options):
    """Push three times, publishing what was pushed; return what this rank wrote, agreed and compared."""
    rank = paddle.distributed.get_rank()
    os.environ[SECRET] = "a common secret."
    model = build(strategy)
    channel = fc.WeightChannel(url, aoa_config=aoa_config, **options)
    if rank in elsewhere:
        channel._own_place = lambda: b"another machine"
    written, gathered = [], []
    gather = Communicator.all_gather
    Communicator.all_gather = lambda self, payload: gathered.append(payload) or gather(self, payload)
    for seed in (1, 2, 3):
        change(model, seed)
        fc.publish(model, f"{directory}/{seed}", aoa_config=aoa_config)
        before = len(gathered)
        report = channel.push(model)
        collectives = len(gathered) - before
        written.append((report.bytes_written, report.total_bytes, report.planned, report.recycled))
    Communicator.all_gather = gather
    compared = channel.verify(model)
    channel.close()
    return {"written": written, "collectives": collectives, "equal": compared.is_equal, "live": compared.live_compared}


def push_to_nobody(url):
    model = build("tp2")
    try:
        fc.WeightChannel(url).push(model)
    except fc.EngineError as error:
        return str(error)
    return None


def push_different_versions(url):
    model = build("tp2")
    try:
        fc.WeightChannel(url).push(model, version=paddle.distributed.get_rank())
    except fc.ValidationError as error:
        return str(error)
    return None


# -- what is asserted --------------------------------------------------------------------------------------------------


def read(directory):
    found = {}
    for name in sorted(os.listdir(directory)):
        if name.endswith(".safetensors"):
            found.update(load_file(f"{directory}/{name}"))
    return found


NAMES = {"aoa_statements": ["up.weight^T -> up_proj.weight", "words.weight -> embed.weight"]}
CASES = {"tp2 v2": (4, NAMES), "pp2": (2, None), "stage3": (2, None)}


# Others are made of these.
FAST = {("tp2 v2", "one rank elsewhere"), ("pp2", "all elsewhere"), ("stage3", "here")}
WAYS = [
    pytest.param(strategy, way, marks=[] if (strategy, way) in FAST else [pytest.mark.slow])
    for strategy in CASES
    for way in ("here", "one rank elsewhere", "all elsewhere")
]


@pytest.mark.parametrize(("strategy", "way"), WAYS)
def test_the_engine_has_what_publish_writes(world, tmp_path, strategy, way):
    size, names = CASES[strategy]
    ranks = world(size)
    base = str(tmp_path / "0")
    ranks.run(write_base, strategy=strategy, directory=base, aoa_config=names)
    stub = StubEngine(base, read(base), 2)
    server = Receiver("127.0.0.1", 0, b"a common secret.")
    thread = threading.Thread(target=server.run)
    thread.start()
    elsewhere = {"here": (), "one rank elsewhere": (1,), "all elsewhere": tuple(range(size))}[way]
    try:
        results = ranks.run(
            push,
            strategy=strategy,
            directory=str(tmp_path),
            url=stub.url,
            aoa_config=names,
            elsewhere=elsewhere,
            receiver=server.address,
        )
        assert stub.holds(read(tmp_path / "3"))
        assert not stub.holds(read(tmp_path / "2"))
    finally:
        stub.close()
        server.close()
        thread.join()
        channel = fc.WeightChannel(stub.url)._channel
        left = [name for name in os.listdir("/dev/shm") if channel in name]
        for name in left:
            os.unlink(f"/dev/shm/{name}")
    assert len(left) == 1
    total = sum(value.nbytes for value in read(base).values())
    for push_of_ranks in zip(*(each["written"] for each in results)):
        # Every byte arrives once, and no rank sends the whole model.
        assert sum(written for written, *_ in push_of_ranks) == total
        assert all(written < total for written, *_ in push_of_ranks)
    assert [(planned, recycled) for _, _, planned, recycled in results[0]["written"]] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    # The notice, open, written, finished, outcome; one more where replicas are compared.
    assert {each["collectives"] for each in results} == {6 if strategy == "tp2 v2" else 5}
    assert all(each["equal"] for each in results)


def test_an_error_of_the_engine_is_every_ranks(world2):
    first, second = world2.run(push_to_nobody, url="http://127.0.0.1:9")
    assert first == second
    assert "see that the engine runs at this URL" in first


def test_ranks_that_push_different_versions(world2, tmp_path):
    base = str(tmp_path / "0")
    world2.run(write_base, strategy="tp2", directory=base, aoa_config=None)
    stub = StubEngine(base, read(base), 2)
    try:
        first, second = world2.run(push_different_versions, url=stub.url)
    finally:
        stub.close()
    assert first == second
    assert "ranks push different versions. Remedy (FC502)" in first
