"""Worlds with the plugin over functions that look like CUDA's: ``World(n, device="tests.device.fake_ranks")``."""

from __future__ import annotations

from tests.device import plugin
from tests.device.ranks import checked, guarded_calls, prepare

__all__ = ["checked", "environment", "guarded_calls", "prepare"]


def environment(size: int) -> dict[str, str]:
    """Return the variables of the ranks' processes."""
    return plugin.environment(devices=size, runtime="fake")
