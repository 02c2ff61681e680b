"""Training jobs of which every process gets a preemption signal at a random moment, data loaders' workers included.

    python -m tests.manager.group_signals [--seed SEED] [--first NUMBER] [--count COUNT]

A job has one rank, or two that are tensor parallel under Paddle's launcher. Its epochs are short, so that workers start
often. The last step is saved and loads, the status is the documented one, and no process of the job is left.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 120
# What a user passes to keep the workers alive himself.
IGNORE = {"worker_init_fn": lambda worker: [signal.signal(each, signal.SIG_IGN) for each in SIGNALS]}
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LOADERS = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "ignoring": {"num_workers": 2, "persistent_workers": True, **IGNORE},
}


@dataclass(frozen=True)
class Job:
    """What a job is, and when it gets the signal: so many seconds after a step has begun."""

    ranks: int
    number: signal.Signals
    loader: str
    is_async: bool
    step: int
    seconds: float


def draw(seed: int) -> Iterator[Job]:
    """Yield jobs: each kind of loader and signal in turn, three of one rank to one of two."""
    for index in itertools.count():
        rng = random.Random(f"{seed} {index}")
        loader, turn = list(LOADERS)[index % 4], index // 4 % 4
        ranks, number = 1 + (index % 4 == turn), SIGNALS[(index + turn + index // 16) % 2]
        yield Job(ranks, number, loader, rng.random() < 0.5, rng.randint(1, 9), rng.random() / 4)


def train(root: str, ranks: str, loader: str, is_async: str) -> None:
    """Train until a signal comes: the loop of docs/manager.md. Each step adds 1 to each weight."""
    import paddle
    from paddle.distributed import fleet

    import paddle_flexckpt as fc

    if int(ranks) > 1:
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": int(ranks), "pp_degree": 1}
        fleet.init(is_collective=True, strategy=strategy)
        model = fleet.meta_parallel.ColumnParallelLinear(2, 4, has_bias=False, gather_output=False)
    else:
        model = paddle.nn.Linear(2, 4, bias_attr=False)
    model.weight.set_value(paddle.zeros_like(model.weight))
    optimizer = paddle.optimizer.SGD(1.0, parameters=model.parameters())
    dataset = np.arange(20, dtype="float32")
    sampler = fc.ElasticBatchSampler(dataset, batch_size=4, shuffle=True, seed=1)
    batches = paddle.io.DataLoader(dataset, batch_sampler=sampler, **LOADERS[loader])
    step = 0
    with fc.CheckpointManager(root, save_when=(), async_save=is_async == "True", preemption_signals=SIGNALS) as manager:
        while not manager.should_stop:
            for _ in sampler.batches(batches):
                (-model.weight.sum()).backward()
                optimizer.step()
                optimizer.clear_grad()
                step += 1
                time.sleep(0.02)  # a step takes its time
                print("step", step, flush=True)
                if manager.should_save(step):
                    manager.save(step, model=model, optimizer=optimizer, data=sampler)
                if manager.should_stop:
                    break


def processes_of(token: str) -> list[int]:
    """The processes of a job, which all have its token in their environment."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"JOB_TOKEN={token}".encode() in (each / "environ").read_bytes().split(b"\0"):
                found.append(int(each.name))
    return found


def run(job: Job, path: Path) -> None:
    """Run a job, and check what it leaves."""
    import paddle_flexckpt as fc

    token, launch = os.urandom(8).hex(), ["-m", "paddle.distributed.launch", "--nproc_per_node", str(job.ranks)]
    launch += ["--log_dir", str(path / "log")]
    command = [sys.executable, *(launch if job.ranks > 1 else ["-u"]), __file__, str(path / "run")]
    environment = {"PYTHONPATH": str(ROOT), "JOB_TOKEN": token, "FLAGS_tcp_store_using_libuv": "0"}
    with subprocess.Popen(
        [*command, str(job.ranks), job.loader, str(job.is_async)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=path, env={**os.environ, **environment},
    ) as process:  # fmt: skip
        said = []
        for line in process.stdout:
            said.append(line)
            if line == f"step {job.step}\n":
                time.sleep(job.seconds)
                for pid in sorted(processes_of(token)):
                    # USR1 would end the launcher at once.
                    if job.number != signal.SIGUSR1 or job.ranks == 1 or pid != process.pid:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, job.number)
        process.wait(PATIENCE_SECONDS)
    is_told_by_launcher = job.ranks > 1 and job.number == signal.SIGTERM
    text = "".join(said)
    if job.ranks > 1:  # the launcher ends before it has read all that a rank has said
        text = (path / "log" / "workerlog.0").read_text()
    assert process.returncode == (15 if is_told_by_launcher else 0), (process.returncode, text)
    assert processes_of(token) == []
    last = int(re.findall(r"^step (\d+)$", text, re.M)[-1])
    assert [each.step for each in fc.list_checkpoints(path / "run")] == [last], text
    weight = np.zeros((2, 4), "float32")
    fc.load_state_dict({"weight": weight}, fc.latest(path / "run").path, verify="full", optimizer_states="ignore")
    assert (weight == last).all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first job (default %(default)s)")
    parser.add_argument("--count", type=int, default=50, help="jobs (default %(default)s)")
    options = parser.parse_args()
    found: Counter[str] = Counter()
    for index, job in enumerate(draw(options.seed)):
        if options.first <= index < options.first + options.count:
            with tempfile.TemporaryDirectory() as path:
                try:
                    run(job, Path(path))
                    end = "saved"
                except Exception as error:
                    print(f"job {index}: {job}: {error!r}", file=sys.stderr)
                    end = "violations"
            found[f"{job.ranks} ranks, {job.loader}, {job.number.name}: {end}"] += 1
        elif index >= options.first:
            break
    print(json.dumps(dict(sorted(found.items())), indent=1))


if __name__ == "__main__":
    if len(sys.argv) == 5 and not sys.argv[1].startswith("-"):
        train(*sys.argv[1:])
    else:
        main()
