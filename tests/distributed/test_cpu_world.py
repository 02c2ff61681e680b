"""The rehearsal world: its collectives, its training against one process, and how it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from paddle_flexckpt.testing import World, WorldError

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


# -- collectives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_collective_is_exact(world, size, dtype):
    assert world(size).run(f"{JOBS}:collectives", dtype=dtype) == [[]] * size


# -- training equals one process -------------------------------------------------------------------------------------------


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
        assert sliced == (level == "p_g_os")


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


# -- the world -------------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="at least 2 ranks"):
        World(1)


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


def test_a_hanging_rank_is_dumped_and_the_next_job_works():
    with World(2, timeout=60) as world:
        with pytest.raises(WorldError, match=r"hang_on did not finish within 2 s") as caught:
            world.run(f"{JOBS}:hang_on", rank=1, time_limit=2)
        assert not world.alive
        assert "in hang_on" in caught.value.stacks[1]
        assert "in barrier" in caught.value.stacks[0]
        assert [report["rank"] for report in world.run(f"{JOBS}:echo")] == [0, 1]
        assert world.starts == 2
        # A rank that ends without a word, in the same world.
        with pytest.raises(WorldError) as caught:
            world.run(f"{JOBS}:die_on", rank=0)
        assert "the process ended" in caught.value.failures[0]
        assert "rank 0" in caught.value.failures[1]
        pids = world.run(f"{JOBS}:echo")
    for report in pids:
        assert not alive(report["pid"])


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
    import select

    return bool(select.select([pidfd], [], [], seconds)[0])


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
