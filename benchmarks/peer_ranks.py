"""What a rank in the environment of the peers does in a comparison: torch's DCP, safetensors, Orbax.

``benchmarks/ranks.py`` starts it. Peers save and load the values that this library does, with their default settings.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from benchmarks.ranks import State, local_tensors, part, serve

AXES = {"rows": 0, "columns": 1}


class Tensors:
    """Hold the tensors that torch's subjects of a rank save, and those that they load into."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def prepare(self, source: str, targets: list[str], **state: Any) -> None:
        self.state = State(**state)
        self.source = self._make(source)
        self.targets = {layout: self._make(layout) for layout in targets}

    def _make(self, layout: str) -> dict[str, Any]:
        import torch

        made = {}
        for name, values, _ in local_tensors(self.state, layout, self.rank, self.size):
            tensor = torch.from_numpy(values.view(np.int16) if values.dtype == np.uint16 else values)
            made[name] = tensor.view(torch.bfloat16) if self.state.dtype == "bfloat16" else tensor
        return made

    def poison(self, layout: str) -> None:
        for tensor in self.targets[layout].values():
            tensor.fill_(-1)

    def equal(self, layout: str) -> bool:
        import torch

        expected = self._make(layout)
        return all(torch.equal(tensor, expected[name]) for name, tensor in self.targets[layout].items())


class Dcp:
    """``torch.distributed.checkpoint``: DTensors, one file a rank, which it makes durable."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._mesh = tensors, None

    def save(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._described(self._tensors.source, "rows"), checkpoint_id=path)

    def load(self, path: str, layout: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self._described(self._tensors.targets[layout], layout), checkpoint_id=path)

    def _described(self, state: dict[str, Any], layout: str) -> dict[str, Any]:
        """Make the DTensors outside of what counts: on the first call."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        if self._mesh is None:
            self._mesh = init_device_mesh("cpu", (self._tensors.size,))
        kept = self.__dict__.setdefault("_kept", {})
        if kept.get(layout, (None,))[0] is not state:
            described = {name: DTensor.from_local(t, self._mesh, [Shard(AXES[layout])]) for name, t in state.items()}
            kept[layout] = state, described
        return kept[layout][1]


class Safetensors:
    """A safetensors file for each rank, without any metadata of the whole; ranks read what they need of all files."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def save(self, path: str) -> None:
        import os

        from safetensors.torch import save_file

        os.makedirs(path, exist_ok=True)
        save_file(self._tensors.source, f"{path}/{self._tensors.rank}.safetensors")

    def load(self, path: str, layout: str) -> None:
        from safetensors import safe_open

        own, state = self._tensors, self._tensors.state
        if layout == "rows":
            with safe_open(f"{path}/{own.rank}.safetensors", "pt") as file:
                for name, tensor in own.targets[layout].items():
                    tensor.copy_(file.get_tensor(name))
            return
        begin, extent = (part(layout, state.shape, own.rank, own.size).offset[1], state.shape[1] // max(own.size, 2))
        for rank in range(own.size):
            stored = part("rows", state.shape, rank, own.size)
            rows = slice(stored.offset[0], stored.offset[0] + stored.shape[0])
            with safe_open(f"{path}/{rank}.safetensors", "pt") as file:
                for name, tensor in own.targets[layout].items():
                    tensor[rows] = file.get_slice(name)[:, begin : begin + extent]


class Orbax:
    """Orbax in one process, whose devices stand for the ranks; it makes files durable and loads into new memory."""

    def __init__(self, size: int) -> None:
        import jax

        self._jax, self.size = jax, size
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))

    def prepare(self, source: str, targets: list[str], **state: Any) -> None:
        del targets
        self._state = State(**state)
        self._source = {name: self._made(values, source) for name, values, _ in self._whole()}
        self._loaded: dict[str, Any] = {}

    def _whole(self) -> Any:
        return local_tensors(self._state, "rows", 0, 1)

    def _made(self, values: np.ndarray, layout: str) -> Any:
        if self._state.dtype == "bfloat16":
            import ml_dtypes

            values = values.view(ml_dtypes.bfloat16)
        return self._jax.device_put(values, self._sharding(layout))

    def _sharding(self, layout: str) -> Any:
        axes = ("x", None) if layout == "rows" else (None, "x")
        return self._jax.sharding.NamedSharding(self._mesh, self._jax.sharding.PartitionSpec(*axes))

    def save(self, path: str) -> None:
        import orbax.checkpoint as ocp

        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(path, self._source)

    def load(self, path: str, layout: str) -> None:
        import orbax.checkpoint as ocp

        arguments = {
            name: ocp.ArrayRestoreArgs(sharding=self._sharding(layout), global_shape=array.shape, dtype=array.dtype)
            for name, array in self._source.items()
        }
        with ocp.PyTreeCheckpointer() as checkpointer:
            self._loaded = checkpointer.restore(path, restore_args=arguments)
            self._jax.block_until_ready(self._loaded)

    def poison(self, layout: str) -> None:
        self._loaded = {}

    def equal(self, layout: str) -> bool:
        bits = np.uint16 if self._state.dtype == "bfloat16" else np.uint32
        return len(self._loaded) == self._state.tensors and all(
            np.array_equal(np.asarray(self._loaded[name]).view(bits), values.view(bits))
            for name, values, _ in self._whole()
        )


def main(address: str, key: str, kind: str, rank: str, size: str, meeting: str) -> None:
    """Serve as one rank."""
    if kind == "orbax":
        orbax = Orbax(int(size))
        subjects: dict[str, Any] = {"memory": orbax, "Orbax": orbax}
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(size))
        tensors = Tensors(int(rank), int(size))
        subjects = {"memory": tensors, "DCP": Dcp(tensors), "safetensors": Safetensors(tensors)}
    host, _, port = address.partition(":")
    serve((host, int(port)), bytes.fromhex(key), int(rank), subjects)


if __name__ == "__main__":
    main(*sys.argv[1:])
