"""One rank of a :class:`~paddle_flexckpt.testing.world.World`. Started by ``paddle.distributed.launch``, not imported.

It connects to the controller before anything else, so that from its first moment on it ends when the controller does.
Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # A script's folder comes first on sys.path; there, names like "frames" and "world" would hide other modules.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from paddle_flexckpt.testing import frames
from paddle_flexckpt.testing.world import ADDRESS_VARIABLE


class Worker:
    """A worker process, which takes jobs from the controller, one at a time, and answers each.

    The main thread runs the jobs. A second thread reads the connection: it queues jobs, passes an abort on to the mesh
    at once, and ends the process when the connection closes, whatever the main thread is doing.
    """

    def __init__(self) -> None:
        host, port, token, log_dir = os.environ.pop(ADDRESS_VARIABLE).split(":", 3)
        self.rank = int(os.environ["PADDLE_TRAINER_ID"])
        # Not closed: it must be writable at any time. With `chain`, the default action (to end the process) follows the
        # dump, which is how the controller knows that the dump is complete.
        self._stacks = open(Path(log_dir) / f"stacks.{self.rank}", "w")  # noqa: SIM115
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True, chain=True)
        self._sock = socket.create_connection((host, int(port)))
        frames.send_hello(self._sock, token, rank=self.rank, pid=os.getpid())
        self._jobs: queue.Queue[dict[str, Any]] = queue.Queue()
        self._has_mesh = False
        self._devices: Any = None  # the module that gives this rank its device
        threading.Thread(target=self._read, name="controller", daemon=True).start()

    def loop(self) -> None:
        """Serve until the controller sends ``exit``."""
        while (message := self._jobs.get())["do"] != "exit":
            answer: dict[str, Any] = {"job": message["job"]}
            try:
                answer["result"] = getattr(self, "do_" + message["do"])(message)
                json.dumps(answer, default=_plain)
            except BaseException as error:  # any exception of a job, SystemExit included, is its result
                answer = {"job": message["job"], "error": _traceback_of(error)}
            if message["do"] == "run" and self._devices is not None:
                answer["guarded_calls"] = self._devices.guarded_calls()
            sys.stdout.flush()
            sys.stderr.flush()
            frames.send_frame(self._sock, json.loads(json.dumps(answer, default=_plain)))
        # Not through the interpreter's teardown: with Paddle's threads alive it sometimes ends in SIGSEGV.
        os._exit(0)

    def do_prepare(self, message: dict[str, Any]) -> None:
        """Import Paddle, which takes long; the controller waits for all ranks before the rendezvous."""
        import paddle  # noqa: F401

        if message["device"]:
            sys.path.extend(entry for entry in message["path"] if entry not in sys.path)
            self._devices = importlib.import_module(message["device"])
            self._devices.prepare()
        else:
            from paddle_flexckpt.testing import cpu_world

            # The controller limits the time, and can show the stacks; the mesh needs no limit of its own.
            cpu_world.install(timeout=None, close_at_exit=False)
            self._has_mesh = True
        # The launcher sends this when another rank has died. Not before the import, which has a handler of its own.
        faulthandler.register(signal.SIGTERM, file=self._stacks, all_threads=True, chain=True)

    def do_init(self, message: dict[str, Any]) -> None:
        """Join the world group."""
        import paddle
        from paddle.base import core

        if self.rank == 0:
            # The controller lets the others begin now: a client that finds no store yet sleeps for three seconds.
            frames.send_frame(self._sock, {"do": "opening"})
        core.create_or_get_global_tcp_store()
        paddle.distributed.init_parallel_env()
        # Paddle makes no process group for a world of one.
        if paddle.distributed.get_world_size() > 1:
            paddle.distributed.barrier()

    def do_run(self, message: dict[str, Any]) -> Any:
        """Run one job in a fresh fleet."""
        import paddle

        from paddle_flexckpt.testing import cpu_world

        sys.path.extend(entry for entry in message["path"] if entry not in sys.path)
        cpu_world.reset_fleet(message["job"])
        # Collections of garbage look at this job's objects alone: Paddle's own would take nearly all of their time.
        if not gc.get_freeze_count():
            gc.freeze()
        paddle.set_default_dtype("float32")
        checked = contextlib.nullcontext() if self._devices is None else self._devices.checked()
        # Names are keys of optimizer states; those of one job must not depend on how many layers earlier jobs made.
        with checked, paddle.utils.unique_name.guard():
            module, _, name = message["target"].partition(":")
            job: Any = importlib.import_module(module)
            for part in name.split("."):
                job = getattr(job, part)
            return job(**message["kwargs"])

    def _read(self) -> None:
        try:
            while True:
                message, _ = frames.recv_frame(self._sock)
                if message["do"] == "abort":
                    self._abort(message)
                else:
                    self._jobs.put(message)
        except BaseException as error:
            # EOFError: the controller is gone. After any other error the controller cannot be reached either.
            sys.stderr.write(f"worker {self.rank} ends: {error!r}\n")
            sys.stderr.flush()
            os._exit(0 if isinstance(error, EOFError) else 1)

    def _abort(self, message: dict[str, Any]) -> None:
        # Before do_prepare there is no mesh to wait in, on devices never. The job may be one still in the queue.
        if self._has_mesh:
            from paddle_flexckpt.testing import cpu_world

            cpu_world.mesh().abort(f"the job was aborted: {message['reason']}", message["job"])


def _traceback_of(error: BaseException) -> str:
    """Return the traceback without this module's frames; of an abort, also without those of the waiting mesh."""
    found = traceback.TracebackException.from_exception(error)
    own = Path(__file__).parent
    while found.stack and found.stack[0].filename == __file__:
        del found.stack[0]
    if type(error).__name__ == "MeshError" and "the job was aborted" in str(error):
        while found.stack and own in Path(found.stack[-1].filename).parents:
            del found.stack[-1]
    return "".join(found.format())


def _plain(value: Any) -> Any:
    """Encode numbers and arrays of numpy as JSON."""
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a job's result must be JSON, numpy included, but a part of it is {type(value).__name__}")


if __name__ == "__main__":
    Worker().loop()
