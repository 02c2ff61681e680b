"""The simulated operating system of all nodes: ``os``, ``fcntl``, ``mmap`` and ``open`` for their processes.

Tested in tests/simulation/test_system.py.
"""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.simulated.name_calls import NameCalls
from tests.simulated.os_module import constants, os_module
from tests.simulated.paths import path_class
from tests.simulated.scheduler import Scheduler
from tests.simulated.threads import Namespace


class System(NameCalls):
    """Stand for the operating systems of all nodes, as far as files are concerned.

    Attributes:
        os: What stands for ``os``.
        modules: What stands for which module, by name; ``open`` among them.
        names: What stands for single names of modules.
    """

    def __init__(self, scheduler: Scheduler, on_call: Callable[[str, str], float] = lambda kind, where: 0.0) -> None:
        """Args: on_call: asked before each call, see :class:`Calls`."""
        super().__init__(scheduler, on_call)
        self.os = os_module(self)
        self.modules: dict[str, Any] = {
            "os": self.os,
            "fcntl": Namespace(__name__="fcntl", **constants(fcntl), flock=self.flock),
            "mmap": Namespace(__name__="mmap", **constants(mmap), mmap=self.map),
            "open": self.open_stream,
            "shutil": Namespace(__name__="shutil", rmtree=self.remove_tree, disk_usage=self.disk_usage),
        }
        self.names: dict[Any, Any] = {Path: path_class(self)}
