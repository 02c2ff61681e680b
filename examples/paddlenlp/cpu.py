"""Runs a script with what Paddle's CPU build lacks for hybrid parallelism: ``cpu.py script.py ...``. Not for GPUs."""

import runpy
import sys

from paddle_flexckpt.testing import cpu_world

if __name__ == "__main__":
    cpu_world.install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
