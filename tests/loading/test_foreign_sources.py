"""What other programs have written, loaded into shards of several ranks and into whole tensors."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.foreign.formats import detect_format
from paddle_flexckpt.foreign.paddle_checkpoint import read_plain_file
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.merged import load_merged_state_dict
from paddle_flexckpt.run_state.schedules import plain_scheduler_problem
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.foreign import test_huggingface as huggingface
from tests.foreign import test_npz as npz
from tests.foreign import test_paddle_pickles as paddle_pickles
from tests.foreign import test_paddleformers_checkpoint as paddleformers
from tests.foreign import test_torch_dcp as torch_dcp
from tests.foreign import test_unified_checkpoint as unified

pytest.importorskip("paddle")
pytestmark = pytest.mark.paddle


def columns(comm, expected):
    """A target per key, cut along its last axis if that can be cut."""
    targets, views = {}, {}
    for key, whole in expected.items():
        cut = bool(whole.ndim) and whole.shape[-1] % comm.size == 0
        part = whole.shape[-1] // comm.size if cut else 0
        view = whole[..., part * comm.position : part * (comm.position + 1)] if cut else whole
        offset = (0,) * (whole.ndim - 1) + (part * comm.position,) if cut else (0,) * whole.ndim
        local = np.zeros(view.shape, dtype=whole.dtype)
        targets[key] = ShardedWeight(key, local, view.shape, whole.shape, offset)
        views[key] = view
    return targets, views


def load(path, expected, ranks=2, **options):
    """Loads, compares, and gives the reports."""

    def job(comm):
        targets, views = columns(comm, expected)
        report = load_state_dict(targets, path, comm, **options)
        for key, view in views.items():
            np.testing.assert_array_equal(targets[key].local_tensor, view, err_msg=key)
        return report

    return SimulatedWorld(ranks).run(job)


def test_huggingface(tmp_path):
    path = huggingface.write_index(tmp_path)
    for report in load(path, huggingface.TENSORS, strict=True):
        assert (report.bytes_verified, report.bytes_extra) == (0, 0)
        assert report.bytes_read == report.bytes_needed
        assert 0 < report.bytes_needed < report.total_bytes


def test_huggingface_by_statements(tmp_path):
    path = huggingface.write_index(tmp_path)
    expected = {"net.w": np.ascontiguousarray(huggingface.W.T), "net.b": huggingface.B}
    statements = {"aoa_statements": ["model.w^T -> net.w", "model.b -> net.b", "s -> _"]}
    for report in load(path, expected, strict=True, aoa_config=statements):
        assert report.bytes_verified == 0
    load(tmp_path / huggingface.INDEX, expected, aoa_config=statements)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_unified_checkpoint(tmp_path, split, ranks):
    load(unified.write(tmp_path, split), unified.EXPECTED, ranks, strict=True)


def test_statements_come_on_top_of_the_names_of_this_library(tmp_path):
    """States follow their parameter, as in any other checkpoint."""
    unified.write(tmp_path, split=True)
    up = {name: array for name, array in unified.EXPECTED.items() if name.startswith("up.weight")}
    expected = {f"ffn.{name}": np.ascontiguousarray(array.T) for name, array in up.items()}
    load(tmp_path, expected, aoa_config={"aoa_statements": ["up.weight^T -> ffn.up.weight"]})


def test_master_weights_that_were_removed_start_from_their_parameters(tmp_path):
    unified.write(tmp_path)
    masters = {f"{name}.w_0": array for name, array in unified.MODEL.items()}
    with pytest.raises(ValidationError, match="the source has no such key"):
        load(tmp_path, masters)
    for report in load(tmp_path, masters, master_weights="convert", optimizer_states="ignore"):
        assert set(report.masters) == set(masters)


def test_paddleformers(tmp_path):
    path = paddleformers.write(tmp_path)
    load(path, paddleformers.EXPECTED, strict=True)
    # One directory is enough for its own keys.
    load(path / "model_state", paddleformers.HELD["model_state"], strict=True)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_torch_dcp(tmp_path, ranks):
    """Inside the chunks of two ranks of torch, along one axis and the other, no byte more than is needed is read."""
    for report in load(torch_dcp.write(tmp_path), torch_dcp.ARRAYS, ranks, strict=True):
        assert report.bytes_read == report.bytes_needed
        assert report.bytes_extra == 0
        assert report.bytes_needed < report.total_bytes or ranks == 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_arrays_of_numpy_and_state_dicts_of_paddle(tmp_path, ranks):
    """Bit for bit, and of these files the bytes of the targets alone."""
    for module in (npz, paddle_pickles):
        path = tmp_path / module.__name__
        path.mkdir()
        expected = module.ARRAYS if module is npz else module.MODEL
        for report in load(module.write(path), expected, ranks, strict=True):
            assert report.bytes_read == report.bytes_needed
            assert report.bytes_extra == 0


def test_whole_tensors(tmp_path):
    for name, module in (("huggingface", huggingface), ("unified", unified), ("paddleformers", paddleformers)):
        path = tmp_path / name
        path.mkdir()
        (huggingface.write_index if module is huggingface else module.write)(path)
        expected = huggingface.TENSORS if module is huggingface else module.EXPECTED
        merged = load_merged_state_dict(path)
        assert list(merged) == sorted(expected)
        for key, tensor in merged.items():
            dtype = str(expected[key].dtype)
            assert str(tensor.dtype) == f"paddle.{dtype}"
            got = tensor.numpy()
            np.testing.assert_array_equal(got.view(expected[key].dtype) if dtype == "bfloat16" else got, expected[key])
    averages = load_merged_state_dict(tmp_path / "paddleformers", prefix="ema_state")
    np.testing.assert_array_equal(averages["w.w_0"].numpy(), paddleformers.W + 300)


def test_what_paddle_itself_saves_in_three_directories(tmp_path):
    """As PaddleFormers calls it; in single precision there are no master weights, and it says so by an empty save."""
    import paddle
    import paddle.distributed as dist

    expected = {}
    for name in paddleformers.STATE_DIRECTORIES:
        held = {} if name == "master_weight" else paddleformers.HELD[name]
        expected.update(held)
        dist.save_state_dict({key: paddle.to_tensor(array) for key, array in held.items()}, str(tmp_path / name))
    assert detect_format(tmp_path) == "paddleformers"
    load(tmp_path, expected, strict=True)


def test_state_of_a_scheduler(tmp_path):
    """Which others write as it is, and this library with the schedulers inside it."""
    import paddle

    def scheduler():
        return paddle.optimizer.lr.LinearWarmup(paddle.optimizer.lr.CosineAnnealingDecay(0.1, 10), 2, 0.0, 0.1)

    old, new = scheduler(), scheduler()
    for _ in range(5):
        old.step()
    paddle.save(old.state_dict(), str(tmp_path / "scheduler.pdparams"))
    state = read_plain_file(tmp_path, "scheduler.pdparams")
    assert plain_scheduler_problem(new, state) is None
    new.set_state_dict(state)
    for _ in range(3):
        assert new.get_lr() == old.get_lr()
        old.step(), new.step()
    other = paddle.optimizer.lr.NoamDecay(64, 10)
    assert "LinearWarmup_LR" in plain_scheduler_problem(other, state)


@pytest.mark.parametrize("verify", ["read", "off"])
def test_nothing_can_be_verified(tmp_path, verify):
    path = huggingface.write_index(tmp_path)
    load(path, huggingface.TENSORS, verify=verify)
    with pytest.raises(ValidationError, match="checkpoint .huggingface., without checksums: verify='full'"):
        load(path, huggingface.TENSORS, verify="full")


def test_every_rank_hears_of_a_missing_file(tmp_path):
    path = huggingface.write_index(tmp_path)
    (path / "model-00002-of-00002.safetensors").unlink()

    def job(comm):
        targets, _ = columns(comm, huggingface.TENSORS)
        with pytest.raises(CorruptCheckpointError, match=r"model-00002-of-00002\.safetensors is missing") as caught:
            load_state_dict(targets, path, comm)
        assert not any(target.local_tensor.any() for target in targets.values())
        return str(caught.value)

    assert len(set(SimulatedWorld(2).run(job))) == 1
