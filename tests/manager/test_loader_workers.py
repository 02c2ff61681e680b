"""Workers of data loaders under the signals of a manager, and at the end of the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
from paddle.io import DataLoader
from paddle.io.dataloader.dataloader_iter import _DataLoaderIterMultiProcess

from paddle_flexckpt.manager.preemption import LoaderWorkers, PreemptionSignals
from tests.background.helpers import await_end
from tests.manager.group_signals import Job, run

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "job",
    [Job(1, TERM, "workers", False, 3, 0.0), Job(1, USR1, "ignoring", True, 6, 0.1)],
    ids=["one that starts workers in each epoch", "one whose own workers ignore all signals"],
)
def test_a_job_of_which_every_process_gets_the_signal_saves_and_ends(tmp_path, job):
    run(job, tmp_path)


@pytest.fixture
def loader():
    made = DataLoader(np.arange(40, dtype="int64"), batch_size=1, num_workers=1, persistent_workers=True)
    yield made
    if made._iterator is not None:
        made._iterator._try_shutdown_all()


def test_a_worker_ignores_the_signals_of_open_managers_and_ends_by_others_with_status_0(loader):
    first, second = PreemptionSignals([TERM, USR1]), PreemptionSignals([USR1])
    batches = iter(loader)
    (worker,) = loader._iterator._workers
    seen = []
    for watch, signals in ((first, (TERM, USR1)), (second, (USR1,))):
        for number in signals:
            os.kill(worker.pid, number)
        seen += [next(batches).item() for _ in range(10)]
        watch.close()
    assert seen == list(range(20))
    os.kill(worker.pid, USR1)
    worker.join()
    assert worker.exitcode == 0


def test_the_start_method_of_processes_stays_the_caller_s():
    code = (
        "import multiprocessing, signal, paddle\n"
        "from paddle_flexckpt.manager.preemption import PreemptionSignals\n"
        "PreemptionSignals([signal.SIGTERM])\n"
        "multiprocessing.set_start_method('spawn')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_paddle_is_as_it_was_when_no_manager_is_open():
    workers, before = LoaderWorkers(), _DataLoaderIterMultiProcess._init_workers
    for signals, change in (([TERM, USR1], 1), ([USR1], 1), ([TERM, USR1], -1)):
        workers.count(signals, change)
        assert _DataLoaderIterMultiProcess._init_workers is not before
    workers.count([USR1], -1)
    assert _DataLoaderIterMultiProcess._init_workers is before


def test_a_workers_own_function_is_called_with_its_number_and_with_no_signal_held():
    watch, seen = PreemptionSignals([TERM, USR1]), []

    class Seen(paddle.io.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return np.array(seen)

    begin = lambda worker: seen.extend([worker, *signal.pthread_sigmask(0, [])])  # noqa: E731
    (found,) = DataLoader(Seen(), num_workers=1, worker_init_fn=begin)
    watch.close()
    assert found.numpy().tolist() == [[0]]


def test_idle_workers_end_with_a_trainer_that_is_killed():
    code = """
import os, signal, sys, numpy as np, paddle
from paddle_flexckpt.manager.preemption import LoaderWorkers, PreemptionSignals
watch = PreemptionSignals([signal.SIGTERM])
loader = paddle.io.DataLoader(np.arange(2), batch_size=1, num_workers=2, persistent_workers=True)
batches = list(loader)
print(*[each.pid for each in loader._iterator._workers], flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        workers = [os.pidfd_open(int(each)) for each in trainer.stdout.readline().split()]
        trainer.kill()
        for worker in workers:
            await_end(worker)
