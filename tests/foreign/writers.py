"""Pickles as Paddle's own save_state_dict writes them, made without Paddle: of any release's module path and fields."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

NEW, OLD = "paddle.distributed.flex_checkpoint.dcp.metadata", "paddle.distributed.checkpoint.metadata"


@contextmanager
def classes(module: str) -> Iterator[types.SimpleNamespace]:
    """Classes of the three names that pickle under the given module; they take any fields."""
    made = types.ModuleType(module)

    def init(self: Any, **values: Any) -> None:
        self.__dict__.update(values)

    for name in ("Metadata", "LocalTensorMetadata", "LocalTensorIndex"):
        setattr(made, name, type(name, (), {"__module__": module, "__init__": init, "__qualname__": name}))
    parts = module.split(".")
    packages = [".".join(parts[:count]) for count in range(1, len(parts))]
    # The pickler imports what it names, packages first; Paddle need not be there.
    stubs = {name: types.ModuleType(name) for name in packages if name not in sys.modules}
    with patch.dict(sys.modules, {**stubs, module: made}):
        yield types.SimpleNamespace(**vars(made))


def metadata_pickle(
    files: dict[str, list[dict[str, Any]]], module: str = NEW, left_out: tuple[str, ...] = (), protocol: int = 4
) -> bytes:
    """A ``.metadata`` file.

    Args:
        files: Shards by file: dicts with ``key``, ``dtype``, ``shape`` (global), ``offset``, ``local`` and ``flat``.
        module: Where the classes are said to be.
        left_out: Fields that an older writer did not have.
        protocol: The pickle's.
    """
    with classes(module) as of:
        states: dict[str, list[Any]] = {}
        storage = {}

        def fields(**values: Any) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name not in left_out}

        for file, shards in files.items():
            for s in shards:
                flat = s.get("flat")
                values = fields(
                    global_offset=s["offset"],
                    local_shape=s["local"],
                    dtype=s["dtype"],
                    global_shape=s["shape"],
                    is_flattened=flat is not None,
                    flattened_range=flat,
                )
                states.setdefault(s["key"], []).append(of.LocalTensorMetadata(**values))
                index = fields(
                    tensor_key=s["key"],
                    global_offset=s["offset"],
                    is_flattened=flat is not None,
                    flattened_range=flat,
                    replica_id=None,
                    local_shape=s["local"],
                )
                storage[of.LocalTensorIndex(**index)] = file
        flat_mapping = {key: (key,) for key in states}
        return pickle.dumps(
            of.Metadata(state_dict_metadata=states, storage_metadata=storage, flat_mapping=flat_mapping), protocol
        )
