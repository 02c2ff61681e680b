"""Names of files and directories that mark the program whose checkpoint a directory may hold.

They are looked up before a program's reader is imported: a reader takes milliseconds to import, and there are many.
Tested in tests/cli/test_imports.py and tests/foreign/test_not_found.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.media.opening import open_backend

TENSOR_FILE, INDEX_FILE = ".safetensors", ".safetensors.index.json"
PARAMETERS_FILE, OPTIMIZER_FILE = ".pdparams", ".pdopt"
NPZ_FILE = ".npz"
# PaddleFormers' names of the inner directories. Only the last of them has keys that another has.
STATE_DIRECTORIES = ("model_state", "optimizer_state", "master_weight")
_PADDLE = re.compile(r"(\d+)\.metadata", re.ASCII)
Mark = Literal["paddleformers", "torch_dcp", "megatron", "deepspeed", "safetensors", "paddle_pickle"]
# Endings of names that may concern readers, which examine them more closely.
_MARKS: dict[Mark, tuple[str, ...]] = {
    "paddleformers": STATE_DIRECTORIES,
    "torch_dcp": (".metadata",),
    "megatron": ("metadata.json",),
    "deepspeed": ("_states.pt",),
    "safetensors": (TENSOR_FILE, INDEX_FILE),
    "paddle_pickle": (PARAMETERS_FILE, OPTIMIZER_FILE),
}


def has_mark(mark: Mark, names: Iterable[str]) -> bool:
    """Return whether one of the names in a directory has a mark."""
    return any(name.endswith(_MARKS[mark]) for name in names)


def paddle_ids(location: Location) -> list[int]:
    """Return the ids of Paddle's own checkpoints in a directory, in rising order."""
    names = open_backend(location).names()
    return sorted(int(match[1]) for match in map(_PADDLE.fullmatch, names) if match)
