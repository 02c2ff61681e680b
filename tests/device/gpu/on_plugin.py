"""Run something with the plugin's devices: ``python -m tests.device.gpu.on_plugin RUNTIME DEVICES WORD ...``.

It compiles the plugin if that was not done, and becomes ``python WORD ...``, with the variables that Paddle finds the
devices by. Both devices are the same one where a machine has one GPU.
"""

from __future__ import annotations

import os
import sys

from tests.device import plugin


def main() -> None:
    runtime, devices, *words = sys.argv[1:]
    reason = plugin.missing_tools(runtime=runtime)
    if reason:
        sys.exit(f"the plugin cannot be compiled for the runtime {runtime}: {reason}")
    os.environ.update(plugin.environment(devices=int(devices), runtime=runtime))
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main()
