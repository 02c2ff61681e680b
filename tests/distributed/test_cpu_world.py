"""The rehearsal world: its collectives, its training against one process, and how it fails."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.testing import World, WorldError, frames

pytest.importorskip("paddle")
pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

JOBS = "tests.distributed.jobs_cpu_world"
#: Of losses and parameters after three AdamW steps in float32; measured differences are below 4e-7.
TOLERANCE = 2e-5


def agree(world, job, tolerance=TOLERANCE, **kwargs):
    """Runs a training job and checks what each rank reports about it; returns what is left of the reports."""
    reports = world.run(f"{JOBS}:{job}", **kwargs)
    for rank, (loss, param, *_) in enumerate(reports):
        assert loss <= tolerance, f"rank {rank}: losses differ by {loss}"
        assert param <= tolerance, f"rank {rank}: parameters differ by {param}"
    return [report[2:] for report in reports]


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_collective_is_exact(world, size, dtype):
    assert world(size).run(f"{JOBS}:collectives", dtype=dtype) == [[]] * size


# -- training equals one process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel(world, size, gather):
    agree(world(size), "tensor_parallel", gather=gather)


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallel(world, size):
    agree(world(size), "sequence_parallel")


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_sharding(world, size, split, clip):
    agree(world(size), "sharding", split=split, clip=clip)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("split", [False, True])
def test_sharding_in_half_precision(world2, split, dtype):
    agree(world2, "sharding", tolerance=2e-2, split=split, dtype=dtype)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_group_sharded(world2, level, clip):
    for (sliced,) in agree(world2, "group_sharded", level=level, clip=clip):
        assert sliced == (3 if level == "p_g_os" else 0)  # fc1.weight, fc1.bias and fc2.weight: above 64 elements


@pytest.mark.parametrize("size", [2, 4])
def test_data_parallel(world, size):
    for differed_alone, difference_after in agree(world(size), "data_parallel"):
        assert differed_alone
        assert difference_after == 0


def test_gradient_accumulation(world2):
    agree(world2, "gradient_accumulation")


def test_pipeline_of_two(world2):
    agree(world2, "pipeline", layout={"pp": 2})


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 4},
        {"pp": 2, "mp": 2},
        {"pp": 2, "dp": 2},
        {"pp": 2, "sharding": 2},
        {"pp": 2, "sharding": 2, "split_param": True},
    ],
    ids=str,
)
def test_pipeline_of_four_ranks(world4, layout):
    agree(world4, "pipeline", layout=layout)


def test_interleaved_pipeline(world4):
    agree(world4, "pipeline", layout={"pp": 4}, layers=8, chunks=2)


def test_expert_parallel(world2):
    agree(world2, "expert_parallel")


@pytest.mark.parametrize("gate", ["gshard", "switch"])
def test_random_gates_run(world2, gate):
    # They draw random numbers, so there is nothing to compare with.
    assert world2.run(f"{JOBS}:expert_parallel", gate=gate) == [[True]] * 2


# -- the world ---------------------------------------------------------------------------------------------------------


def test_fleet_takes_other_degrees_in_one_world(world4):
    layouts = [{"mp": 4}, {"dp": 4}, {"mp": 2, "sharding": 2}, {"pp": 2, "dp": 2}, {"sharding": 4}]
    reports = world4.run(f"{JOBS}:degrees", layouts=layouts)
    wanted = [[layout.get(axis, 1) for axis in ("dp", "mp", "pp", "sharding")] for layout in layouts]
    for report in reports:
        assert [entry[:4] for entry in report] == wanted
        # Parameter names start over in every job, not in every fleet.init.
        assert [entry[4] for entry in report] == [f"linear_{n}.w_0" for n in range(len(layouts))]


def test_wrong_degrees_are_refused(world2):
    with pytest.raises(WorldError, match="is not the world size 2"):
        world2.run(f"{JOBS}:degrees", layouts=[{"mp": 4}])


def test_results_come_in_rank_order_and_as_json(world4):
    reports = world4.run(f"{JOBS}:echo", a=[1, None], b={"c": "d"})
    assert [report["rank"] for report in reports] == [0, 1, 2, 3]
    assert reports[0]["array"] == [0, 1, 2]
    assert reports[0]["kwargs"] == {"a": [1, None], "b": {"c": "d"}}


def test_a_function_object_is_a_job_too(world2):
    from tests.distributed import jobs_cpu_world

    assert [report["rank"] for report in world2.run(jobs_cpu_world.echo)] == [0, 1]


def test_what_cannot_be_sent_is_refused(world2):
    with pytest.raises(ValueError, match="top-level function"):
        world2.run(lambda: None)
    with pytest.raises(ValueError, match="must be JSON"):
        world2.run(f"{JOBS}:echo", a=object())
    with pytest.raises(ValueError, match="at least 1 rank"):
        World(0)


def test_a_failure_on_one_rank_is_told_and_the_world_lives_on(world4):
    before = world4.run(f"{JOBS}:echo")
    with pytest.raises(WorldError, match="on rank 2 first") as caught:
        world4.run(f"{JOBS}:raise_on", rank=2)
    assert "KeyError: 'only rank 2 fails'" in caught.value.failures[2]
    assert "in raise_on" in caught.value.failures[2]
    # The others were waiting for rank 2 and were told, rather than left to wait.
    for rank in (0, 1, 3):
        assert "the job was aborted: rank 2 failed" in caught.value.failures[rank]
    assert world4.run(f"{JOBS}:echo") == before  # the same processes


def test_what_a_failed_job_left_behind_does_not_reach_the_next(world2):
    with pytest.raises(WorldError, match="half way"):
        world2.run(f"{JOBS}:leave_unread")
    (value, first_id), (_, second_id) = world2.run(f"{JOBS}:receive_fresh")
    assert value == 5.0
    assert first_id == second_id


def test_a_hanging_rank_is_dumped_and_the_next_job_works(tmp_path):
    with World(2, timeout=60, env={"REHEARSAL": "yes"}, log_dir=tmp_path / "logs") as world:
        with pytest.raises(WorldError, match=r"hang_on did not finish within 2 s") as caught:
            world.run(f"{JOBS}:hang_on", rank=1, time_limit=2)
        assert not world.alive
        assert "in hang_on" in caught.value.stacks[1]
        assert "in barrier" in caught.value.stacks[0]
        reports = world.run(f"{JOBS}:echo")
        assert [report["rank"] for report in reports] == [0, 1]
        assert world.starts == 2
        assert world.run(f"{JOBS}:environment", name="REHEARSAL") == ["yes", "yes"]
        # A rank that ends without a word takes the world with it.
        with pytest.raises(WorldError) as caught:
            world.run(f"{JOBS}:die_on", rank=0)
        assert "the process ended" in caught.value.failures[0]
        # The launcher ends the other one, which may not have come to its own error by then.
        assert any(words in caught.value.failures[1] for words in ("rank 0", "the process ended"))
        assert not world.alive
        assert not any(alive(report["pid"]) for report in reports)
    # The logs of every start stay where the caller wanted them.
    assert [(tmp_path / "logs" / f"start{n}" / "workerlog.1").exists() for n in (1, 2)] == [True, True]
    with pytest.raises(ValueError, match="has been closed"):
        world.run(f"{JOBS}:echo")


def test_a_world_that_cannot_start_says_why():
    message = "did not start: the launcher ended with code"
    with World(2, env={"PYTHONHOME": "/nowhere"}) as world, pytest.raises(WorldError, match=message):
        world.run(f"{JOBS}:echo")


def test_uninstall_takes_every_patch_back(world2):
    installed, uninstalled, again = world2.run(f"{JOBS}:patched")[0]
    assert installed == again == [True, True, 2.0]
    assert uninstalled == [False, False, 2.0]  # a group made before goes on working


def test_stock_checkpoint_moves_shards(world2, tmp_path):
    pytest.importorskip("paddle", "3.3", reason="save_state_dict of older releases takes no ShardedWeight")
    assert world2.run(f"{JOBS}:stock_checkpoint", path=str(tmp_path)) == [[0, 0, 1, 1]] * 2


def launch(tmp_path, text, size=2):
    """Runs a script under the launcher, as a user would, without a World."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(size)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "CUDA_"))}
    root = str(Path(__file__).parents[2])
    command += ["--host", "127.0.0.1", "--log_dir", str(tmp_path / "log"), str(script)]
    done = subprocess.run(command, env={**env, "PYTHONPATH": root}, capture_output=True, text=True, timeout=100)
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in range(size)]
    return done.returncode, logs


def test_a_script_of_its_own_ends_clean(tmp_path):
    code, logs = launch(
        tmp_path,
        """
        import sys
        import paddle
        from paddle_flexckpt.testing import cpu_world
        cpu_world.install()
        hcg = cpu_world.init_fleet(mp=2)
        x = paddle.ones([2])
        paddle.distributed.all_reduce(x, group=hcg.get_model_parallel_group())
        print("sum", x.tolist())
        """,
    )
    assert code == 0, logs
    assert all("sum [2.0, 2.0]" in log for log in logs)


def test_a_script_that_fails_ends_the_others(tmp_path):
    code, logs = launch(
        tmp_path,
        """
        import paddle
        from paddle_flexckpt.testing import cpu_world
        cpu_world.install(timeout=60)
        cpu_world.init_fleet(dp=2)
        paddle.distributed.barrier()
        if paddle.distributed.get_rank() == 1:
            raise ValueError("on purpose")
        paddle.distributed.barrier()
        """,
    )
    assert code != 0
    assert "on purpose" in logs[1]
    assert "rank 1 has left" in logs[0]


# -- the mesh, without Paddle's store ----------------------------------------------------------------------------------


class Store:
    """What the mesh uses of a TCPStore: get() waits for the key, and returns bytes."""

    def __init__(self):
        self.values, self.news = {}, threading.Condition()

    def set(self, key, value):
        with self.news:
            self.values[key] = value.encode()
            self.news.notify_all()

    def get(self, key):
        with self.news:
            assert self.news.wait_for(lambda: key in self.values, 20), key
            return self.values[key]


@pytest.fixture
def pair():
    from paddle_flexckpt.testing.cpu_world import Mesh

    store, meshes = Store(), [Mesh(timeout=20), Mesh(timeout=20)]
    threads = [threading.Thread(target=mesh.start, args=(store, rank, 2)) for rank, mesh in enumerate(meshes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield meshes
    for mesh in meshes:
        mesh.close(None)


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3), np.float32(3), np.empty((0, 4)), np.array([True])])
def test_mesh_carries_any_array(pair, array):
    array = np.asarray(array)
    pair[0].send(1, "x", array)
    got = pair[1].recv(0, "x")
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    assert np.array_equal(got, array)
    assert got.flags.writeable or got.size == 0


@pytest.mark.parametrize("hello", [{"token": "guess", "rank": 0}, {"rank": 0}, "GET / HTTP/1.1\r\n\r\n"], ids=str)
def test_mesh_refuses_strangers(pair, hello):
    with socket.create_connection(("127.0.0.1", pair[1].port)) as stranger:
        if isinstance(hello, dict):
            frames.send_frame(stranger, hello)
        else:
            stranger.sendall(hello.encode())
        # Closed by the mesh: an end, or a reset where it left a part of the hello unread.
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    pair[0].send(1, "x", np.ones(2))
    assert pair[1].recv(0, "x").tolist() == [1, 1]


def test_mesh_says_what_it_missed(pair):
    from paddle_flexckpt.testing.cpu_world import MeshError

    pair[1].timeout = 0.01
    with pytest.raises(MeshError, match=r"rank 1 waits for rank 0 on channel 'x': nothing came within 0\.01 s"):
        pair[1].recv(0, "x")
    pair[1].timeout = 20
    pair[0].send(1, "y", np.ones(1))
    assert pair[1].recv(0, "y").tolist() == [1]
    pair[0].close(None)
    with pytest.raises(MeshError, match="rank 0 has left"):
        pair[1].recv(0, "x")


def test_mesh_does_not_wait_for_a_peer_when_another_one_has_left(pair):
    """Rank 0 has noticed before, in another collective, and sends nothing more: nobody would ever tell rank 1."""
    from paddle_flexckpt.testing.cpu_world import MeshError

    pair[1]._lose(2, "rank 2 has left")
    with pytest.raises(MeshError, match="rank 1 waits for rank 2 on channel 'x': rank 2 has left"):
        pair[1].recv_all([0, 1, 2], "x")


def test_mesh_abort_is_for_one_job(pair):
    from paddle_flexckpt.testing.cpu_world import MeshError

    pair[1].next_epoch(5)
    pair[1].abort("cause", 6)  # comes before this rank has begun job 6
    pair[1].abort("consequence", 6)
    pair[0].next_epoch(5)
    pair[0].send(1, "x", np.ones(1))
    pair[1].recv(0, "x")
    pair[1].next_epoch(6)
    pair[1].next_epoch()  # another fleet within the job
    with pytest.raises(MeshError, match="cause"):
        pair[1].recv(0, "x")
    for mesh in pair:
        mesh.next_epoch(7)
    pair[0].send(1, "x", np.zeros(1))
    assert pair[1].recv(0, "x").tolist() == [0]


def test_frames_refuse_what_is_too_large():
    here, there = socket.socketpair()
    with here, there:
        frames.send_frame(here, {"token": "x" * frames.HELLO_LIMIT})
        with pytest.raises(frames.FrameError, match="above the limit"):
            frames.accept_hello(there, "x")


def test_workers_end_with_their_controller(tmp_path):
    """A killed test run leaves no processes: its workers see the connection close."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from paddle_flexckpt.testing import World\n"
        f"world = World(2, log_dir=sys.argv[2])\nprint([r['pid'] for r in world.run('{JOBS}:echo')], flush=True)\n"
        "sys.stdin.read()\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    command = [sys.executable, "-c", script, root, str(tmp_path / "logs")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as controller:
        pids = [int(pid) for pid in controller.stdout.readline().strip("[]\n").split(",")]
        files = [os.pidfd_open(pid) for pid in pids]
        controller.send_signal(signal.SIGKILL)
    for file in files:
        assert wait_for_end(file, 20), "a worker outlived its controller"
        os.close(file)


def wait_for_end(pidfd, seconds):
    """Whether the process of a pidfd ends within so many seconds."""
    return bool(select.select([pidfd], [], [], seconds)[0])


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
