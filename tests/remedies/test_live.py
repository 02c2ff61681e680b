"""Remedies of calls on live state, each provoked and followed."""

from __future__ import annotations

import contextlib
import os
import shutil

import numpy as np
import paddle
import pytest
from paddle.amp.auto_cast import StateDictHook

import paddle_flexckpt as fc
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer.filling import Filling
from tests.loading.test_transforms import EXPECTED, PLAIN, SCALES, VALUES, Scaled
from tests.remedies.following import provoked

A = np.arange(24, dtype=np.float32).reshape(6, 4)
FFN = fc.FusedAxis(1, "fused_ffn", parts=2)


def loaded(path, shape=(6, 4), key="a", **options) -> np.ndarray:
    target = np.full(shape, -1, np.float32)
    fc.load_state_dict({key: target}, path, **options)
    return target


def halves(comm, axis: int = 0) -> dict:
    part = np.ascontiguousarray(np.split(A, 2, axis)[comm.rank])
    offset = (3 * comm.rank, 0) if axis == 0 else (0, 2 * comm.rank)
    return {"a": fc.ShardedWeight("a", part, part.shape, (6, 4), offset)}


def test_a_fused_parameter_is_saved_and_then_digested(tmp_path):
    natural = np.concatenate([np.concatenate([A[:, i : i + 1], A[:, i + 2 : i + 3]], 1) for i in range(2)], axis=1)
    with provoked("loading/state_digests.py", "save the state, and digest the checkpoint"):
        fc.digest({"a": fc.ShardedWeight("a", natural, (6, 4), (6, 4), (0, 0), fused=FFN)})
    fc.save_state_dict({"a": fc.ShardedWeight("a", natural, (6, 4), (6, 4), (0, 0), fused=FFN)}, tmp_path)
    assert fc.digest(tmp_path) == fc.digest({"a": A})


def test_whole_tensors_are_taken_before_the_next_step():
    layer = paddle.nn.Linear(4, 4)
    before = layer.weight.numpy()
    tensors = fc.full_param(layer.state_dict(), process_group="self", memory_growth_threshold=1)
    next(tensors)
    layer.weight.set_value(layer.weight + 1)
    with provoked("loading/full_param.py", "take all tensors before the next training step"):
        list(tensors)
    layer.weight.set_value(before)
    taken = dict(fc.full_param(layer.state_dict(), process_group="self"))
    layer.weight.set_value(layer.weight + 1)
    assert taken["weight"].numpy().tolist() == before.tolist()


def test_a_load_for_which_there_was_no_memory_is_made_again(tmp_path, monkeypatch):
    fc.save_state_dict({"a": A}, tmp_path)
    target = np.full((6, 4), -1, np.float32)

    def without_memory(self):
        raise MemoryError("Cannot allocate 4 MB")

    with monkeypatch.context() as patches:
        patches.setattr(Filling, "finish", without_memory)
        with provoked("transfer/transfer.py", "make the same call again before they are used") as caught:
            fc.load_state_dict({"a": target}, tmp_path)
    assert "MemoryError: Cannot allocate 4 MB. Targets may be partly overwritten." in str(caught.value)
    fc.load_state_dict({"a": target}, tmp_path)
    assert target.tolist() == A.tolist()


def test_more_axes_than_paddle_has(tmp_path):
    wide = A.reshape((1,) * 10 + (6, 4))
    fc.save_state_dict({"a": wide}, tmp_path)
    with provoked("loading/merged.py", "give load_state_dict() an array of numpy as its target, or reshape it"):
        fc.load_merged_state_dict(tmp_path)
    assert loaded(tmp_path, wide.shape).tobytes() == A.tobytes()
    config = {"aoa_statements": ['a -> a, reshape="[6, 4]"']}
    assert fc.load_merged_state_dict(tmp_path, aoa_config=config)["a"].numpy().tolist() == A.tolist()


def test_a_key_of_a_plain_state_dict_that_is_of_another_model(tmp_path):
    one, two = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4)
    two.extra = paddle.nn.Linear(2, 2)
    states = two.state_dict()
    with provoked(
        "memory/state_statements.py",
        "pass the sharded_state_dict() of the model to which it belongs, or leave this key out",
    ):
        fc.plain_state_statements(one.state_dict(), {"extra.weight": states["extra.weight"]})
    assert fc.plain_state_statements(states, {"extra.weight": states["extra.weight"]}) == []
    assert fc.plain_state_statements(one.state_dict(), {}) == []


def test_ranks_that_share_no_directory(tmp_path):
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.mkdir()

    def save(comm, path, **options):
        fc.save_state_dict(halves(comm), path, comm, **options)

    with provoked("saving/shared_saves.py", "or save with storage='per_node', to a directory on each node"):
        SimulatedWorld(2).run(lambda comm: save(comm, paths[comm.rank]))
    SimulatedWorld(2).run(lambda comm: save(comm, tmp_path / "shared"))
    assert loaded(tmp_path / "shared").tobytes() == A.tobytes()
    SimulatedWorld(2).run(lambda comm: save(comm, paths[comm.rank], storage="per_node"))

    def load(comm, path):
        target = {"a": np.zeros_like(A)}
        fc.load_state_dict(target, path, comm, storage="per_node")
        return target["a"].tobytes()

    assert SimulatedWorld(2).run(lambda comm: load(comm, paths[comm.rank])) == [A.tobytes()] * 2
    # One node's directory alone has half of the data.
    with provoked("native/data_file.py", "load with storage='per_node' where a rank sees that directory, or copy"):
        loaded(paths[0])
    with provoked("loading/file_peers.py", "let a rank see these directories, or load another checkpoint"):
        loaded(paths[0], storage="per_node")
    both = tmp_path / "both"
    shutil.copytree(paths[0], both)
    shutil.copytree(paths[1], both, dirs_exist_ok=True)
    assert loaded(both).tobytes() == A.tobytes()
    assert sorted(os.listdir(both)) == sorted({*os.listdir(paths[0]), *os.listdir(paths[1])})


def test_a_transform_needs_all_of_the_files(tmp_path):
    stored = {"w.codes": VALUES.astype(np.int8), "w.scales": SCALES}
    fc.save_state_dict(stored, tmp_path / "nodes", storage="per_node")
    target = {"w": np.zeros(EXPECTED.shape, EXPECTED.dtype)}
    with provoked("transfer/options.py", "load from shared storage, or copy the nodes' directories into one"):
        fc.load_state_dict(target, tmp_path / "nodes", storage="per_node", load_transform=Scaled())
    shutil.copytree(tmp_path / "nodes", tmp_path / "one")
    fc.load_state_dict(target, tmp_path / "one", load_transform=Scaled())
    assert target["w"].tobytes() == EXPECTED.tobytes()


def test_a_transform_that_fails_is_corrected_or_left_out(tmp_path):
    class Failing(Scaled):
        def apply(self, logical_key, source_tensors, output_dtype):
            raise KeyError(logical_key)

    fc.save_state_dict({"w.codes": VALUES.astype(np.int8), "w.scales": SCALES, "plain": PLAIN}, tmp_path)
    target = {"w": np.zeros(EXPECTED.shape, EXPECTED.dtype)}
    with provoked("loading/transforms.py", "correct the transform, or load without it"):
        fc.load_state_dict(target, tmp_path, load_transform=Failing())
    fc.load_state_dict(target, tmp_path, load_transform=Scaled())
    assert target["w"].tobytes() == EXPECTED.tobytes()
    assert loaded(tmp_path, PLAIN.shape, "plain").tobytes() == PLAIN.tobytes()


@pytest.mark.parametrize("inner", [contextlib.nullcontext, paddle.no_grad])
def test_copies_of_parameters_are_no_targets(tmp_path, inner):
    """The hooks of ``paddle.amp.decorate(save_dtype=)`` cast what ``state_dict()`` gives."""
    model = paddle.nn.Linear(4, 6, bias_attr=False)
    model.weight.set_value(paddle.to_tensor(A.T.copy()))
    fc.save_state_dict(model.state_dict(), tmp_path)
    model.weight.set_value(paddle.zeros([4, 6]))
    model.register_state_dict_hook(StateDictHook("float32"))
    with inner():
        state = model.state_dict()
    with provoked("sharded_weight.py", "call sharded_state_dict() of the model itself"):
        fc.load_state_dict(state, tmp_path)
    with contextlib.ExitStack() as stack:
        fc.install()
        stack.callback(fc.uninstall)
        fc.load_state_dict(model.sharded_state_dict(), tmp_path)
    assert np.array_equal(model.weight.numpy(), A.T)


def test_copies_in_shards_are_no_targets(tmp_path):
    model = paddle.nn.Linear(4, 6)
    fc.save_state_dict(model.state_dict(), tmp_path)
    model.register_state_dict_hook(StateDictHook("float32"))
    with pytest.raises(fc.ValidationError, match="key 'weight'.*FC804"):
        fc.load_state_dict(fc.build_sharded_state_dict(model.state_dict()), tmp_path)


def test_tensors_of_paddle_load_are_targets(tmp_path):
    """They have the names of the parameters that were saved, and are no copies of these."""
    model = paddle.nn.Linear(4, 6)
    fc.save_state_dict(model.state_dict(), tmp_path / "c")
    paddle.save(model.state_dict(), str(tmp_path / "y"))
    state = paddle.load(str(tmp_path / "y"))
    assert state["weight"].name == model.weight.name
    state["weight"].zero_()
    fc.load_state_dict(state, tmp_path / "c")
    assert np.array_equal(state["weight"].numpy(), model.weight.numpy())
