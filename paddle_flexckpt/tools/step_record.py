"""A manager's record of a checkpoint, in one small tensor of it: step, time and metrics.

Retention, the choice of the best checkpoint and ``flexckpt ls`` read only this tensor.

Tested in tests/manager/test_manager.py and tests/cli/test_overview.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE, CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.portable import decode, encode
from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.native.manifest import Manifest

RECORD = f"{EXTRA_STATE}manager"
# The part of a run's extra state that has the degrees of parallelism.
LAYOUT = f"{EXTRA_STATE}common"
_VERSION = 1


@dataclass(frozen=True)
class StepRecord:
    """A manager's record of the checkpoint of one step.

    Attributes:
        step: Training step.
        time: When it was saved, in seconds since the epoch, by the coordinator's clock.
        metrics: The metrics given at the save.
        run: The identity of the run that saved it; "" if it had none.
    """

    step: int
    time: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    run: str = ""

    def encode(self) -> np.ndarray:
        """Return the record as a tensor: uint8 ``[bytes]``, the same on every rank."""
        fields = {"version": _VERSION, "step": self.step, "time": self.time, "metrics": dict(self.metrics)}
        if self.run:
            fields["run"] = self.run
        return np.frombuffer(encode(fields, RECORD), dtype=np.uint8).copy()

    @classmethod
    def decode(cls, array: np.ndarray) -> StepRecord:
        """Return the record in an array of :meth:`encode`.

        Raises:
            CorruptCheckpointError: It is not one.
            ValidationError: It is one of a newer version.
        """
        fields = decode(array.tobytes(), RECORD)
        try:
            if fields["version"] != _VERSION:
                raise ValidationError(
                    [
                        f"{RECORD} is of version {fields['version']!r}; this library reads {_VERSION}. Remedy (FC307): "
                        "update it"
                    ]
                )
            metrics = {str(name): float(value) for name, value in fields["metrics"].items()}
            return cls(int(fields["step"]), float(fields["time"]), metrics, str(fields.get("run", "")))
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{RECORD} is damaged: {error!r}") from error


def read_record(directory: Backend, manifest: Manifest, quickly: bool = False) -> StepRecord | None:
    """Return the record of a checkpoint; None if no manager saved it.

    Args:
        directory: The checkpoint's directory.
        manifest: The manifest, at least with the rows of :data:`RECORD`.
        quickly: Whether a record in one piece is read without its checksum, and so without the modules of a load.

    Raises:
        CorruptCheckpointError: The record is damaged.
        ValidationError: It is of a newer version.
    """
    array = _read(directory, manifest, RECORD, quickly)
    return None if array is None else StepRecord.decode(array)


def _read(directory: Backend, manifest: Manifest, key: str, quickly: bool) -> np.ndarray | None:
    """Return a tensor of bytes; None if there is none of that name; other arguments as of :func:`read_record`."""
    catalog = manifest.catalog
    if key not in catalog.keys:
        return None
    rows = np.flatnonzero(catalog.key == catalog.keys.index(key))
    name = catalog.file_name(int(rows[0])) if quickly and len(rows) == 1 else None
    if name is not None:
        row = int(rows[0])
        with directory.open(name) as file:
            data = file.read(int(catalog.byte_offset[row]), int(catalog.byte_length[row]))
        return np.frombuffer(data, dtype=np.uint8)
    from paddle_flexckpt.tools.whole_tensors import iterate_tensors  # most of the transfer, for this alone

    ((_, array),) = iterate_tensors(directory, manifest, names=[key])
    return array


def read_degrees(directory: Backend, manifest: Manifest, quickly: bool = False) -> dict[str, int]:
    """Return the degrees of parallelism of the run that saved a checkpoint, by fleet's names; none without fleet.

    Args:
        directory: The checkpoint's directory.
        manifest: The manifest, at least with the rows of :data:`LAYOUT`.
        quickly: As of :func:`read_record`.

    Raises:
        CorruptCheckpointError: The record is damaged, or its file is.
    """
    array = _read(directory, manifest, LAYOUT, quickly)
    if array is None:
        return {}
    try:
        layout = json.loads(array.tobytes())["layout"]  # other values may be in tensors
        return {str(name): int(degree) for name, degree in layout.items() if name != "world_size"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{LAYOUT} is damaged: {error!r}") from error
