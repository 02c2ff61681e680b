"""A file of DeepSpeed's: its pickled object, where the elements of its tensors begin, and its number of steps.

Tested in tests/foreign/test_deepspeed.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.foreign.deepspeed_values import DEEPSPEED
from paddle_flexckpt.foreign.torch_archive import open_archive, place_elements
from paddle_flexckpt.foreign.torch_values import SavedTensor
from paddle_flexckpt.media.backend import Backend, open_member

# Names, shapes and settings: for 100,000 parameters some 30 MB.
_MOST_PICKLE_BYTES = 64 << 20


class Progress(NamedTuple):
    """The number of steps that an optimizer has taken, and its betas; None where they are not in the file."""

    steps: float
    betas: tuple[float, ...] = ()


class DeepSpeedFile(NamedTuple):
    """A file: its name, rank, bytes, the pickled object, where tensors begin, and those that are one number."""

    name: str
    rank: int
    size: int
    value: Mapping[Any, Any]
    places: Mapping[SavedTensor, int]
    numbers: Mapping[SavedTensor, float]

    def number(self, value: Any) -> float | None:
        """Return a number, or that of a tensor of one element; None if it is neither."""
        found: Any = self.numbers.get(value) if type(value) is SavedTensor else value
        return float(found) if type(found) in (int, float) else None

    def progress(self, base: Mapping[Any, Any], number: int) -> Progress | None:
        """Return the progress of a group, as its inner optimizer has saved it; None where it has no number of steps."""
        states, groups = base.get("state"), base.get("param_groups")
        state = states.get(number) if type(states) is dict else None
        group = groups[number] if type(groups) is list and number < len(groups) else None
        told: dict[Any, Any] = {**(group if type(group) is dict else {}), **(state if type(state) is dict else {})}
        steps, said = self.number(told.get("step")), told.get("betas")
        betas = tuple(said) if isinstance(said, (tuple, list)) else ()
        return None if steps is None else Progress(steps, betas if all(type(beta) is float for beta in betas) else ())

    def progress_of_model(self) -> Progress | None:
        """Return the progress of all parameters by a model's file, which counts the steps and the skipped ones."""
        steps, skipped = self.number(self.value.get("global_steps")), self.number(self.value.get("skipped_steps", 0))
        return None if steps is None or skipped is None else Progress(steps - skipped)


def load_deepspeed_file(backend: Backend, name: str, rank: int) -> DeepSpeedFile:
    """Read a file's pickle, and find the elements of all tensors in it.

    Raises:
        CorruptCheckpointError: It is damaged; UnsafePickleError if it is more than data.
    """
    where = backend.where(name)
    with open_member(backend, name) as file:
        archive = open_archive(file.read, file.size, where, DEEPSPEED, _MOST_PICKLE_BYTES, {})
        places, numbers = dict[SavedTensor, int](), dict[SavedTensor, float]()
        stack = [archive.value]
        while stack:
            each = stack.pop()
            if type(each) is dict:
                stack.extend(each.values())
            elif type(each) is list:
                stack.extend(each)
            elif type(each) is SavedTensor and each.dtype in DTYPES and each not in places:
                places[each] = place_elements(file.read, archive, each, where)[0]
                if not each.size:
                    dtype = DTYPES[each.dtype].numpy
                    numbers[each] = np.frombuffer(file.read(places[each], dtype.itemsize), dtype)[0].item()
        value = archive.value if type(archive.value) is dict else {"param": archive.value}
        return DeepSpeedFile(name, rank, file.size, value, places, numbers)
