"""Give the environment variables with which a process gets the rehearsal device.

Tested in tests/device/test_plugin.py.
"""

from __future__ import annotations

from .build import build

DEVICE_TYPE = "rehearsal"

# Paddle keeps freed memory for later unless it is told to give it back at once. Only then does the device know that
# memory is freed: its counters of memory are exact, and a use of freed memory is found.
_FREE_AT_ONCE = {"FLAGS_allocator_strategy": "auto_growth", "FLAGS_free_idle_chunk": "1"}


def environment(devices: int = 2, **settings: object) -> dict[str, str]:
    """Compile the plugin if necessary, and return the environment variables of a process that shall have it.

    Args:
        devices: Number of devices.
        **settings: Settings of :func:`configure`, and ``open`` (1: the host may touch device memory).
    """
    variables = {f"REHEARSAL_{name.upper()}": str(value) for name, value in settings.items()}
    return {"CUSTOM_DEVICE_ROOT": str(build()), "REHEARSAL_DEVICES": str(devices), **_FREE_AT_ONCE, **variables}
