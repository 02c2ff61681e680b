"""Habits: what a simulated job asks for beyond plain saves and restores, by the names in :data:`HABITS`.

What the library does only with much data, it does here with little: some of its sizes are smaller then.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

MIB = 1 << 20
# Of which the header of a data file has several.
PART_BYTES = 700
# How likely each is.
HABITS: dict[str, float] = {
    "asks": 0.15,  # which steps there are, which is the best, and whether they are whole
    "best": 0.1,  # restores the best checkpoint, where a policy keeps one
    "blocking": 0.1,  # saves every other step in the foreground, though saves are in the background
    "clock": 0.1,  # saves by the clock as well
    "copies": 0.5,  # keeps each data file on two nodes
    "cooperative": 0.1,  # restores read on one rank what several need
    "gs": 0.3,  # an object store with another protocol
    "large": 0.02,  # has a tensor of some MiB
    "pages": 0.1,  # writes a page beside each step
    "partitions": 0.15,  # has manifests in partitions
    "memory": 0.0,  # keeps the newest steps in the memory of nodes; drawing.py draws it, with what it needs
    "parity": 0.0,  # protects the files of nodes by parity; drawing.py draws it, with what it needs
    "parts": 0.3,  # sends files in parts, to an object store
    "replicas": 0.1,  # saves every replica
    "reports": 0.1,  # writes a report beside each step
    "rising": 0.5,  # gives each save to nodes an id of its own
    "upgrade": 0.15,  # begins with a checkpoint of an older version of the library
    "verify": 0.15,  # restores verify whole blocks
    "waves": 0.5,  # has little memory for copies, of a large tensor
}
# Only with these storages, or kinds of saves.
_NEEDS: dict[str, dict[str, Any]] = {
    "copies": {"storage": "per_node"},
    "rising": {"storage": "per_node"},
    "gs": {"storage": "object"},
    "parts": {"storage": "object"},
    "blocking": {"is_async": True},
    "waves": {"is_async": True},
}
# What a job that saves to its nodes' disks may have.
_ON_NODES = frozenset(("copies", "rising", "large", "partitions"))


def draw_habits(seed: int, **scenario: Any) -> tuple[str, ...]:
    """Draw those of a scenario. They are drawn for themselves, so that new ones change nothing else."""
    choose = random.Random(f"habits {seed}")
    drawn = [name for name, share in HABITS.items() if share and choose.random() < share]
    fits = [name for name in drawn if all(scenario[of] == value for of, value in _NEEDS.get(name, {}).items())]
    if scenario["storage"] == "per_node":
        fits = [name for name in fits if name in _ON_NODES]
    if "large" in fits and "upgrade" in fits:
        fits.remove("upgrade")  # it has no such tensor
    if "waves" in fits and "large" not in fits:
        fits.remove("waves")
    return tuple(fits)


def sizes_for(habits: Sequence[str]) -> dict[tuple[str, str], Any]:
    """Return what the library's own sizes are instead: by module and name."""
    found: dict[tuple[str, str], Any] = {}
    if "partitions" in habits:
        found |= {("native.partitions", "MOST_ROWS_IN_ONE_FILE"): 2, ("native.partitions", "ROWS_PER_PARTITION"): 3}
    if "parts" in habits:
        found["media.s3", "LEAST_PART_BYTES"] = PART_BYTES
    if "waves" in habits:
        found |= {("saving.save_options", "LEAST_BYTES"): MIB, ("native.data_file", "BATCH_BYTES"): MIB // 2}
    return found


def storage_options(habits: Sequence[str]) -> dict[str, Any]:
    """Return options of the location."""
    return {"part_bytes": PART_BYTES, "requests_at_once": 2} if "parts" in habits else {}


def manager_options(habits: Sequence[str]) -> dict[str, Any]:
    """Return options of the manager."""
    found: dict[str, Any] = {name: True for name in ("pages", "reports") if name in habits}
    if "waves" in habits:
        found["staging_bytes"] = 4 * MIB
    return found


def save_options(habits: Sequence[str], is_blocking: bool) -> dict[str, Any]:
    """Return options of a save."""
    found: dict[str, Any] = {"save_replicas": True} if "replicas" in habits else {}
    if "blocking" in habits:
        found["blocking"] = is_blocking
    return found


def restore_options(habits: Sequence[str], keep: Sequence[str]) -> dict[str, Any]:
    """Return options of a restore, where policies keep something."""
    found: dict[str, Any] = {}
    if "best" in habits and any(policy.startswith("best") for policy in keep):
        found["step"] = "best"
    if "cooperative" in habits:
        found["comm_method"] = "cooperative"
    if "verify" in habits:
        found["verify"] = "full"
    return found
