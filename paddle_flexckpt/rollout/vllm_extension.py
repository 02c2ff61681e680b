"""vLLM's side: ``--worker-extension-cls paddle_flexckpt.rollout.vllm_extension.FlexExtension``.

Weights are loaded by the model's own loaders, so every slice, fusion and padding is the engine's. On CPUs vLLM packs
linear weights and drops what they were packed from: they are loaded layer by layer, as vLLM reloads them, and read
again by multiplying rows of the identity.

Tested in tests/rollout/test_vllm.py.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from paddle_flexckpt.rollout.engine_worker import EngineWorker, LiveComparison, Tensors, answer

# Rows of the identity that are multiplied at a time.
_ROWS = 256


def register() -> None:
    """Register the weight-transfer engine ``flexckpt``; vLLM calls this in each of its processes, maybe twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            "flexckpt", "paddle_flexckpt.rollout.vllm_transfer", "FlexTransferEngine"
        )


def _method(name: str) -> Callable[..., dict[str, Any]]:
    """Return the method of a worker that calls one of its :class:`EngineWorker`, and answers a status."""

    def method(self: Any, *arguments: str, **named: str) -> dict[str, Any]:
        def call(*arguments: str, **named: str) -> dict[str, Any]:
            return getattr(worker_of(self.model_runner.get_model(), self.vllm_config), name)(*arguments, **named)

        return answer(self.rank, call, arguments, named)

    return method


class FlexExtension:
    """The methods of a worker that ``/collective_rpc`` calls, as :class:`EngineWorker` describes them."""

    flex_worker_status = _method("status")

    def flex_status(self: Any, *arguments: str, **named: str) -> dict[str, Any]:
        """Return the worker's status, and how many engines the server has: it passes on the answers of the first."""
        return {
            **self.flex_worker_status(*arguments, **named),
            "data_parallel_size": self.vllm_config.parallel_config.data_parallel_size,
        }

    flex_begin = _method("begin")
    flex_stage = _method("stage")
    flex_commit = _method("commit")
    flex_rollback = _method("rollback")
    flex_accept = _method("accept")
    flex_discard = _method("discard")
    flex_digests = _method("digests")


def worker_of(model: Any, vllm_config: Any) -> EngineWorker:
    """Return the one worker of a model."""
    if not hasattr(model, "_flexckpt_worker"):
        model._flexckpt_worker = EngineWorker(VllmEngine(model, vllm_config), vllm_config.model_config.model)
    return model._flexckpt_worker


def _as_torch(tensors: Tensors) -> Iterator[tuple[str, Any]]:
    """Yield arrays as tensors of torch over the same memory, which they keep mapped."""
    import torch

    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    for name, array in tensors.items():
        flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
        yield name, flat.view(getattr(torch, array.dtype.name)).reshape(array.shape)


class VllmEngine:
    """The model of one of vLLM's workers."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        """Args: model: the worker's model. vllm_config: its configuration."""
        self._model, self._config = model, vllm_config

    def load(self, tensors: Tensors) -> None:
        """Load a complete set of tensors; RuntimeError if an earlier load did not end: it would leave out tensors."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import layerwise

        if any(layerwise.get_layerwise_info(layer).can_load() for layer in self._model.modules()):
            raise RuntimeError("an earlier load of weights did not end")
        with set_current_vllm_config(self._config):
            layerwise.initialize_layerwise_reload(self._model)
            try:
                self._model.load_weights(_as_torch(tensors))
            finally:  # without it, parameters would stay without memory, and the next request would end the engine
                layerwise.finalize_layerwise_reload(self._model, self._config.model_config)
            for _, layer in _packed_layers(self._model):
                if layer.weight.numel():  # a tied head: its weight is new, its packed copy is not
                    layer.quant_method.process_weights_after_loading(layer)

    def compare(self, tensors: Tensors) -> LiveComparison:
        """Compare parameters with a complete set of tensors, by loaders whose copies only compare."""
        import torch
        from vllm.config import set_current_vllm_config

        result = LiveComparison()
        with set_current_vllm_config(self._config), torch.no_grad(), _loadable(self._model) as unpack:
            for name, tensor in _as_torch(tensors):
                comparison = _comparison(unpack)
                try:
                    with comparison:
                        self._model.load_weights([(name, tensor)])
                except Exception as error:
                    result.unreadable[name] = f"{type(error).__name__}: {error}"
                    continue
                if not comparison.results:
                    result.unreadable[name] = "this rank loads no part of it"
                    continue
                result.compared += 1
                if not all(comparison.results):
                    result.different.append(name)
        for name, layer in _packed_layers(self._model):
            if layer.weight.numel() and not torch.equal(_unpack(layer, *layer.weight.shape), layer.weight):
                result.different.append(f"{name}.weight, as packed")
        return result


def _packed_layers(model: Any) -> list[tuple[str, Any]]:
    """Return the layers with a packed copy of their weight."""
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if hasattr(layer, "cpu_linear") and hasattr(layer, "quant_method") and not layer.weight.is_meta
    ]


def _unpack(layer: Any, rows: int, columns: int) -> Any:
    """Return a packed weight, from its products with rows of the identity, which are exact."""
    import torch

    weight = torch.empty(rows, columns, dtype=layer.weight.dtype)
    for first in range(0, columns, _ROWS):
        last = min(first + _ROWS, columns)
        identity = torch.zeros(last - first, columns, dtype=weight.dtype)
        identity[:, first:last].fill_diagonal_(1)
        weight[:, first:last] = layer.cpu_linear(identity, layer.weight, None).t()
    return weight


@contextlib.contextmanager
def _loadable(model: Any) -> Iterator[Callable[[int], Any]]:
    """Give packed layers parameters as their loaders expect, without memory; yield what unpacks that of a storage."""
    from vllm.model_executor.model_loader.reload import layerwise, meta, sanitize

    packed, layers = [], {}
    for _, layer in _packed_layers(model):
        recorded = layerwise.get_layerwise_info(layer).restore_metadata[0].get("weight")
        if layer.weight.numel() or recorded is None:
            continue
        parameter = sanitize.restore_layer_refs(meta.to_meta_tensor(recorded), layer)
        parameter.weight_loader = layerwise._get_original_loader(parameter)  # a reload leaves its own in the record
        packed.append((layer, layer.weight))
        layer._parameters["weight"] = parameter
        layers[parameter.untyped_storage()._cdata] = layer

    @functools.lru_cache(maxsize=1)  # the parts of a fused parameter come one after the other
    def unpack(storage: int) -> Any:
        return _unpack(layers[storage], *layers[storage].weight.shape)

    try:
        yield unpack
    finally:
        for layer, weight in packed:
            layer._parameters["weight"] = weight


def _comparison(unpack: Callable[[int], Any]) -> Any:
    """Return a mode in which copies to parameters only compare; ``results`` has a bool for each."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Comparison(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.results: list[bool] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                target, source = args[:2]
                held = target
                if target.is_meta:
                    weight = unpack(target.untyped_storage()._cdata)
                    held = weight.as_strided(target.size(), target.stride(), target.storage_offset())
                self.results.append(torch.equal(held, source.to(held).expand_as(held)))
            elif func._schema.name not in ("aten::fill_", "aten::zero_"):  # of padding
                if func._schema.is_mutable:
                    raise TypeError(f"its loader calls {func}")
                return func(*args, **(kwargs or {}))
            return args[0]

    return Comparison()
