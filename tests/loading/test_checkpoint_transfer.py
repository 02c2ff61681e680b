"""``checkpoint_transfer`` as FastDeploy's workers call it, in each of the three ways that they have had."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import sys
import types

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.loading import checkpoint_transfer
from paddle_flexckpt.testing.simulated import SimulatedWorld

pytestmark = pytest.mark.paddle

VALUES = {
    "w": np.arange(24, dtype=np.float32).reshape(4, 6),
    "half": np.arange(8).astype(ml_dtypes.bfloat16).reshape(2, 4),
    "codes": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
    "flag": np.array([True, False]),
    "number": np.array(7, np.int64),
}
AXES = {"w": 1, "half": 0}


def part(name, rank):
    value = VALUES[name]
    return np.split(value, 2, AXES[name])[rank] if name in AXES else value


@pytest.fixture
def module(monkeypatch):
    """The module, registered; afterwards it is not."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "checkpoint_transfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(checkpoint_transfer, "_made", {})
    yield checkpoint_transfer
    for name in [name for name in sys.modules if name.partition(".")[0] == "checkpoint_transfer"]:
        del sys.modules[name]


@pytest.fixture
def versions(tmp_path):
    for step in (1, 2):
        state = {name: (value + step).astype(value.dtype) if name == "w" else value for name, value in VALUES.items()}
        SimulatedWorld(1).run(
            lambda comm, s=step, d=state: fc.publish_fastdeploy(d, tmp_path / str(s), s, 2, AXES, comm)
        )
    return tmp_path


def equal(tensor, array):
    """Whether a tensor of Paddle has the bytes of an array, its shape and its type."""
    found = tensor.view("uint8").numpy() if str(tensor.dtype).startswith("paddle.float8") else tensor.numpy()
    return (
        isinstance(tensor, paddle.Tensor)
        and tensor.place.is_cpu_place()
        and list(tensor.shape) == list(array.shape)
        and str(tensor.dtype) == f"paddle.{array.dtype}"
        and found.tobytes() == array.tobytes()
    )


# -- as FastDeploy calls it --------------------------------------------------------------------------------------------


def first_way(config, step, rank):
    from checkpoint_transfer.core import RDMAWeightsDownloader

    downloader = RDMAWeightsDownloader(config)
    downloader.initialize()
    data = downloader.get_weights(step, rank)
    assert isinstance(data, (bytes, bytearray))
    return paddle.load(io.BytesIO(data))


def second_way(rsync_config, version, rank, ranks, verify_checksum=False, handle=None):
    from checkpoint_transfer import CheckpointTransfer

    if handle is None:
        handle = CheckpointTransfer(**rsync_config, local_rank=rank, group_size=ranks)
        handle.initialize()
    return dict(handle.receive_stream(step_id=version, verify_checksum=verify_checksum)), handle


def third_way(rsync_config, version, backend="GPU_DIRECT"):
    from checkpoint_transfer.config import Phase1Backend, Role, TransferConfig

    config = {**rsync_config, "role": Role.INFERENCE, "global_rank": 1, "phase1_backend": Phase1Backend[backend]}
    config.update(group_size=2, qsize=2, device="mlx5_0")
    known = {field.name for field in dataclasses.fields(TransferConfig)}
    from checkpoint_transfer.transfer import CheckpointTransfer

    handle = CheckpointTransfer(TransferConfig(**{key: value for key, value in config.items() if key in known}))
    asyncio.run(handle.initialize())
    loaded = list(handle.receive_weights_sync(step_id=version, output_framework="paddle"))
    asyncio.run(handle.cleanup())
    return loaded


# -- what is asserted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_way(module, tmp_path, rank):
    state = {name: value for name, value in VALUES.items() if name != "codes"}
    SimulatedWorld(1).run(lambda comm: fc.publish_fastdeploy(state, tmp_path / "5", 5, 2, AXES, comm))
    module.register()
    found = first_way({"directory": str(tmp_path), "etcd": "elsewhere"}, "5", rank)
    assert found.keys() == state.keys()
    assert all(equal(found[name], part(name, rank)) for name in state)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_second_way(module, versions, rank, verify):
    module.register()
    config = {"directory": str(versions)}
    found, handle = second_way(config, "1", rank, 2, verify)
    assert found.keys() == VALUES.keys()
    assert equal(found["w"], part("w", rank) + 1)
    assert all(equal(found[name], part(name, rank)) for name in VALUES if name != "w")
    found, _ = second_way(config, "2", rank, 2, verify, handle)
    assert equal(found["w"], part("w", rank) + 2)


@pytest.mark.parametrize("backend", ["GPU_DIRECT", "IPC"])
def test_the_third_way(module, tmp_path, backend):
    SimulatedWorld(2).run(lambda comm: fc.publish(dict(VALUES), tmp_path / "0", comm))
    module.register()
    found = third_way({"directory": str(tmp_path), "backend": "mooncake"}, "0", backend)
    assert len(found) == len(VALUES)
    assert all(equal(tensor, VALUES[name]) for name, tensor in found)


@pytest.mark.parametrize("rank", [0, 1])
def test_paddle_loads_a_snapshots_files(versions, rank):
    """As the strategy ``ipc_snapshot`` does."""
    found = {}
    for file in sorted((versions / "2").glob(f"model_state.tp{rank}.{rank}.part*.pdparams")):
        found.update(paddle.load(str(file), safetensors=True))
    assert found.keys() == VALUES.keys()
    assert equal(found["w"], part("w", rank) + 2)
    assert all(equal(found[name], part(name, rank)) for name in VALUES if name != "w")


def test_nothing_is_yielded_of_a_version_that_is_wrong(module, versions):
    module.register()
    from checkpoint_transfer import CheckpointTransfer
    from checkpoint_transfer.config import Role, TransferConfig
    from checkpoint_transfer.transfer import CheckpointTransfer as ModelTransfer

    handle = CheckpointTransfer(directory=str(versions), local_rank=0, group_size=2)
    with pytest.raises(ValidationError, match="no directory for step '3'"):
        handle.receive_stream(step_id="3", verify_checksum=False)
    with pytest.raises(ValidationError, match="for an engine of 2 ranks; got rank 0 of 4"):
        CheckpointTransfer(directory=str(versions), local_rank=0, group_size=4).receive_stream(step_id="1")
    file = versions / "1" / "model_state.tp0.0.part0.pdparams"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CorruptCheckpointError, match="got other bytes"):
        handle.receive_stream(step_id="1", verify_checksum=True)
    with pytest.raises(ValidationError, match="no safetensors files"):
        ModelTransfer(TransferConfig(Role.INFERENCE, 0, directory=str(versions))).receive_weights_sync("1")


def test_configurations_that_do_not_fit(module, tmp_path):
    module.register()
    from checkpoint_transfer.config import Role, TransferConfig
    from checkpoint_transfer.core import RDMAWeightsDownloader
    from checkpoint_transfer.transfer import CheckpointTransfer

    for make in (lambda: RDMAWeightsDownloader({}), lambda: CheckpointTransfer(TransferConfig(Role.INFERENCE, 0))):
        with pytest.raises(ValidationError, match=r"has to have the directory of versions; got .*Remedy \(FC101\)"):
            make()
    with pytest.raises(ValidationError, match=r"only Role\.INFERENCE is served"):
        CheckpointTransfer(TransferConfig(Role.TRAINER, 0, directory=str(tmp_path)))
    with pytest.raises(ValidationError, match="output_framework is 'paddle'; got 'torch'"):
        CheckpointTransfer(TransferConfig(Role.INFERENCE, 0, directory=str(tmp_path))).receive_weights_sync(
            "1", "torch"
        )


def test_registering_twice_changes_nothing(module):
    module.register()
    before = {name: sys.modules[name] for name in sys.modules if name.startswith("checkpoint_transfer")}
    module.register()
    assert before == {name: sys.modules[name] for name in before}
    assert len(before) == 4


@pytest.mark.parametrize("name", ["checkpoint_transfer", "checkpoint_transfer.config"])
def test_another_module_is_never_replaced(module, monkeypatch, name):
    other = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, other)
    with pytest.raises(CheckpointError, match=r"another module checkpoint_transfer is imported. Remedy \(FC901\)"):
        module.register()
    assert sys.modules[name] is other
    assert [found for found in sys.modules if found.startswith("checkpoint_transfer")] == [name]


def test_one_that_is_installed_is_not_hidden(module, monkeypatch, tmp_path):
    (tmp_path / "checkpoint_transfer.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="is installed"):
        module.register()
    assert "checkpoint_transfer" not in sys.modules
