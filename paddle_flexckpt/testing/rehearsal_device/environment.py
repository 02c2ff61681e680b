"""Give the environment variables with which a process gets the rehearsal device."""

from __future__ import annotations

from .build import build

DEVICE_TYPE = "rehearsal"


def environment(devices: int = 2, **settings: object) -> dict[str, str]:
    """Compile the plugin if necessary, and return the environment variables of a process that shall have it.

    Args:
        devices: Number of devices.
        **settings: Settings of :func:`configure`, and ``memory_gib`` (per device), ``open`` (1: the host may touch
            device memory).
    """
    variables = {f"REHEARSAL_{name.upper()}": str(value) for name, value in settings.items()}
    return {"CUSTOM_DEVICE_ROOT": str(build()), "REHEARSAL_DEVICES": str(devices), **variables}
