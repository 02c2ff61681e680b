"""Remedies about the state dicts of saves and loads, each provoked and followed."""

from __future__ import annotations

import numpy as np
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.catalog.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata
from paddle_flexckpt.run_state import collect_extra_state, load_extra_state, restore_extra_state
from paddle_flexckpt.sharded_weight import FusedAxis, ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.remedies.following import advised, provoked

WHOLE = np.arange(24, dtype=np.float32).reshape(6, 4)


def part(rank: int, values: np.ndarray | None = None, **more) -> dict:
    """Rank 0 or 1 has half of the rows."""
    rows = slice(3 * rank, 3 * rank + 3)
    values = WHOLE[rows].copy() if values is None else values
    return {"w": ShardedWeight("w", values, (3, 4), (6, 4), (3 * rank, 0), **more)}


def on_two_ranks(work):
    return SimulatedWorld(2).run(work)


def loaded(path, shape=(6, 4), kind="float32", key="w", **options) -> np.ndarray:
    target = np.full(shape, -1, kind)
    fc.load_state_dict({key: target}, path, **options)
    return target


def more_of(path) -> dict:
    """The values of the run that a checkpoint has under names of the caller's."""
    return restore_extra_state(load_extra_state(path)).more


def test_all_ranks_save_all_of_their_shards(tmp_path):
    def save(comm, both):
        state = part(comm.position) if both or comm.position == 0 else {}
        fc.save_state_dict(state, tmp_path, comm)

    with provoked("catalog/validate.py", "every rank of the process group has to take part with all its shards"):
        on_two_ranks(lambda comm: save(comm, both=False))
    on_two_ranks(lambda comm: save(comm, both=True))
    assert loaded(tmp_path).tobytes() == WHOLE.tobytes()


def test_shards_have_the_same_fused_axis_on_every_rank(tmp_path):
    def save(comm, marks):
        fc.save_state_dict(part(comm.position, fused=marks[comm.position]), tmp_path, comm)

    mark = FusedAxis(0, "gate_up", parts=2)
    with provoked("catalog/orders.py", "give its shards the same FusedAxis on every rank"):
        on_two_ranks(lambda comm: save(comm, [mark, FusedAxis(0, "gate_up", parts=1)]))
    on_two_ranks(lambda comm: save(comm, [mark, mark]))
    target = np.zeros((6, 4), np.float32)
    fc.load_state_dict(
        {"w": ShardedWeight("w", target, (6, 4), (6, 4), (0, 0), fused=FusedAxis(0, "gate_up", parts=2))}, tmp_path
    )
    assert target.tobytes() == WHOLE.tobytes()


def test_metadata_has_the_global_shape():
    def metadata(*shape):
        shard = LocalTensorMetadata((0, 0), (6, 4), "float32", *shape)
        return [Metadata({"v": [shard]}, {LocalTensorIndex("v", (0, 0)): "vfile_0"}, None)]

    target = {"w": np.zeros((6, 4), np.float32)}
    with provoked("catalog/metadata.py", "give LocalTensorMetadata its global_shape"):
        fc._load_state_dict(target, {"vfile_0": {"v": WHOLE}}, metadata(), process_group="self")
    target = {"v": np.zeros((6, 4), np.float32)}
    fc._load_state_dict(target, {"vfile_0": {"v": WHOLE}}, metadata((6, 4)), process_group="self")
    assert target["v"].tobytes() == WHOLE.tobytes()


def test_an_entry_of_a_model_does_not_look_like_extra_state(tmp_path):
    with provoked("catalog/table.py", "values of the run go through collect_extra_state(name=value)"):
        fc.save_state_dict({"extra_state.scale": WHOLE}, tmp_path)
    fc.save_state_dict({"scale": WHOLE, **collect_extra_state(scale=3.5)}, tmp_path)
    assert loaded(tmp_path, key="scale").tobytes() == WHOLE.tobytes()
    assert more_of(tmp_path)["scale"] == 3.5


def test_extra_state_is_made_of_plain_values(tmp_path):
    with provoked("catalog/portable.py", "convert it, or leave it out"):
        collect_extra_state(names={1, 2})
    fc.save_state_dict({"w": WHOLE, **collect_extra_state(names=sorted({1, 2}))}, tmp_path / "converted")
    assert more_of(tmp_path / "converted")["names"] == [1, 2]
    fc.save_state_dict({"w": WHOLE, **collect_extra_state()}, tmp_path / "without")
    assert loaded(tmp_path / "without").tobytes() == WHOLE.tobytes()


def test_a_value_that_is_no_tensor_is_made_one_or_is_extra_state(tmp_path):
    with provoked("memory/state.py", "make it a tensor, or take it out and save it as extra state"):
        fc.save_state_dict({"w": WHOLE, "epoch": 3}, tmp_path)
    fc.save_state_dict({"w": WHOLE, "epoch": np.array([3])}, tmp_path / "tensor")
    assert loaded(tmp_path / "tensor", (1,), "int64", "epoch").tolist() == [3]
    fc.save_state_dict({"w": WHOLE, **collect_extra_state(epoch=3)}, tmp_path / "extra")
    assert more_of(tmp_path / "extra")["epoch"] == 3


def test_a_name_can_be_written(tmp_path):
    with provoked("memory/state.py", "give the entry another name"):
        fc.save_state_dict({"": WHOLE}, tmp_path)
    fc.save_state_dict({"w": WHOLE}, tmp_path)
    assert loaded(tmp_path).tobytes() == WHOLE.tobytes()


def test_the_state_of_a_scheduler_is_saved_beside_the_optimizer(tmp_path):
    def made():
        schedule = paddle.optimizer.lr.StepDecay(0.5, 2)
        layer = paddle.nn.Linear(2, 2)
        return schedule, layer, paddle.optimizer.Momentum(schedule, parameters=layer.parameters())

    schedule, layer, optimizer = made()
    layer(paddle.ones([1, 2])).sum().backward()
    optimizer.step()
    for _ in range(3):
        schedule.step()
    states = optimizer.state_dict()
    with provoked("memory/state.py", "take it out, optimizer_state.pop(") as caught:
        fc.save_state_dict({"model": layer.state_dict(), "optimizer": states}, tmp_path)
    advised("memory/state.py", "LR_Scheduler", str(caught.value))
    states.pop("LR_Scheduler")
    state = {"model": layer.state_dict(), "optimizer": states}
    fc.save_state_dict({**state, **collect_extra_state(schedule)}, tmp_path)
    other = made()[0]
    restore_extra_state(load_extra_state(tmp_path), other)
    assert (other.last_epoch, other.last_lr) == (3, schedule.last_lr)


class Halved(paddle.nn.Layer):
    """One rank's half of a weight."""

    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([4, 2])
        self.weight.is_distributed = True


class WithRules(Halved):
    def _get_shard_rules(self):
        return {"weight": 0}


def test_a_part_is_described_by_its_layer(tmp_path):
    fc.install()
    with provoked("memory/state.py", "use model.sharded_state_dict() instead of model.state_dict()"):
        fc.save_state_dict(Halved().state_dict(), tmp_path)
    with provoked("parallel/layers.py", "give its layer a _get_shard_rules() that returns {name: axis}; for a class"):
        Halved().sharded_state_dict()
    layer = WithRules()
    fc.save_state_dict(layer.sharded_state_dict(), tmp_path)
    assert loaded(tmp_path, (4, 2), key="weight").tobytes() == layer.weight.numpy().tobytes()


def test_padding_is_stripped_from_a_flattened_shard(tmp_path):
    padded = np.arange(8, dtype=np.float32)

    def state(values):
        return {"w": ShardedWeight("w", values, (2, 3), (2, 3), (0, 0), is_flattened=True, flattened_range=slice(0, 6))}

    with provoked("memory/state.py", "strip the padding from the shard"):
        fc.save_state_dict(state(padded), tmp_path)
    fc.save_state_dict(state(padded[:6]), tmp_path)
    assert loaded(tmp_path, (2, 3)).ravel().tolist() == [0, 1, 2, 3, 4, 5]


def test_what_nobody_asks_for_is_loaded_or_allowed(tmp_path):
    fc.save_state_dict({"w": WHOLE, "v": WHOLE + 1}, tmp_path)
    with provoked("transfer/resolution.py", "load it too, or allow it with strict='missing'"):
        loaded(tmp_path, strict=True)
    both = {"w": np.zeros_like(WHOLE), "v": np.zeros_like(WHOLE)}
    fc.load_state_dict(both, tmp_path, strict=True)
    assert both["v"].tobytes() == (WHOLE + 1).tobytes()
    assert loaded(tmp_path, strict="missing").tobytes() == WHOLE.tobytes()


def test_states_that_nobody_asks_for_are_loaded_or_left_out_by_name(tmp_path):
    masters = {"w": WHOLE.astype("float16"), "w.w_0": WHOLE + 0.0001}
    fc.save_state_dict(masters, tmp_path / "masters")
    fc.save_state_dict({"w": WHOLE, "w.moment1_0": WHOLE + 1}, tmp_path / "moments")
    with provoked("transfer/resolution.py", "which has no such states, give optimizer_states='ignore'"):
        loaded(tmp_path / "moments")
    assert loaded(tmp_path / "moments", optimizer_states="ignore").tobytes() == WHOLE.tobytes()
    both = {"w": np.zeros_like(WHOLE), "w.moment1_0": np.zeros_like(WHOLE)}
    fc.load_state_dict(both, tmp_path / "moments")
    assert both["w.moment1_0"].tobytes() == (WHOLE + 1).tobytes()
    with provoked("transfer/resolution.py", "to take float32 parameters from their masters, give master_weights='co"):
        loaded(tmp_path / "masters", dtype="cast")
    assert loaded(tmp_path / "masters", master_weights="convert").tobytes() == masters["w.w_0"].tobytes()


def test_options_of_an_asynchronous_save(tmp_path):
    state = {"w": WHOLE}
    with provoked("saving/save_options.py", "leave them out"):
        fc.save_state_dict(state, tmp_path, storage="per_node", async_save=True, slice_bytes=1 << 20)
    fc.save_state_dict(state, tmp_path / "nodes", storage="per_node", async_save=True).result()
    assert loaded(tmp_path / "nodes", storage="per_node").tobytes() == WHOLE.tobytes()
    with provoked("saving/save_options.py", "leave progress= out, and ask handle.progress"):
        fc.save_state_dict(state, tmp_path, async_save=True, progress=print)
    handle = fc.save_state_dict(state, tmp_path / "progress", async_save=True)
    handle.result()
    assert handle.progress.bytes_done == handle.progress.bytes_total == WHOLE.nbytes
    with provoked("saving/save_options.py", "leave it out, or save synchronously, which takes less"):
        fc.save_state_dict(state, tmp_path, async_save=True, staging_bytes=100)
    fc.save_state_dict(state, tmp_path / "without", async_save=True).result()
    fc.save_state_dict(state, tmp_path / "synchronous")
    for name in ("progress", "without", "synchronous"):
        assert loaded(tmp_path / name).tobytes() == WHOLE.tobytes()


def test_policies_of_replicas_have_names(tmp_path):
    with provoked(
        "saving/replica_policies.py", "give 'equal', 'all', 'close' or 'first' for all keys, or a dict of these by"
    ):
        fc.save_state_dict({"w": WHOLE}, tmp_path, check_replicas="any")
    for policy in ("equal", "all", "close", "first", {"w": "first"}, True, False):
        fc.save_state_dict({"w": WHOLE}, tmp_path, check_replicas=policy)
        assert loaded(tmp_path).tobytes() == WHOLE.tobytes()


def test_masters_that_a_cast_leaves_out_are_a_warning(tmp_path, caplog):
    saved = {"w": WHOLE.astype("float16"), "w.w_0": WHOLE + 0.0001, "w.moment1_0": WHOLE}
    fc.save_state_dict(saved, tmp_path)
    loaded(tmp_path, dtype="cast", optimizer_states="ignore")
    advised("catalog/texts.py", "to take them from their masters, give master_weights='convert'", caplog.text)
    assert "1 float32 parameter comes from values of lower precision, such as 'w'" in caplog.text
    caplog.clear()
    whole = loaded(tmp_path, master_weights="convert", optimizer_states="ignore")
    assert whole.tobytes() == saved["w.w_0"].tobytes() and "precision" not in caplog.text
