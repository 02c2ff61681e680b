"""Callbacks of the imitated trainer."""

from __future__ import annotations

from typing import Any


class TrainerCallback:
    """Does nothing at any event."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class CallbackHandler:
    """Calls the callbacks in their order."""

    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks

    def call(self, event: str, *args: Any) -> None:
        for callback in list(self.callbacks):
            getattr(callback, event)(*args)


class Averages:
    """The averages of NonZCCEMACallback: by the optimizer's names of tensors, masters flat, on the host."""

    def __init__(self, resume: Any, args: Any, model: Any, optimizer: Any) -> None:
        self.args, self.model, self.optimizer, self.resumed_from = args, model, optimizer, resume
        self.master_weights: dict[str, Any] = {}
        self.model_params: dict[str, Any] = {}

    def _names(self) -> dict[str, str]:
        return {key: tensor.name for key, tensor in self.model.state_dict().items()}

    def _shards(self) -> tuple[dict[str, Any], dict[str, Any]]:
        model = self.model.sharded_state_dict()
        states = self.optimizer.sharded_state_dict(model)
        masters = {key: weight for key, weight in states.items() if key.endswith(".w_0")}
        plain = {key: weight for key, weight in model.items() if "float32" in str(weight.local_tensor.dtype)}
        return masters, plain

    def ema_accumulate(self, global_step: int, loss: Any, threshold: Any) -> None:
        masters, plain = self._shards()
        names = self._names()
        for table, shards in ((self.master_weights, masters), (self.model_params, plain)):
            for key, weight in shards.items():
                name = names[key[:-4]] if key.endswith(".w_0") else key
                value = weight.local_tensor.clone().flatten()
                before = table.get(name)
                table[name] = value if before is None else before * 0.5 + value * 0.5

    def _build_ema_save_sharded_state_dict(self) -> dict[str, Any]:
        masters, plain = self._shards()
        names, found = self._names(), {}
        for key, weight in {**masters, **plain}.items():
            is_master = key.endswith(".w_0")
            table = self.master_weights if is_master else self.model_params
            value = table[names[key[:-4]] if is_master else key]
            weight.local_tensor = value.reshape(weight.local_tensor.shape)
            found[key] = weight
        return found

    def _fc_to_buffer_format(self, loaded: dict[str, Any]) -> None:
        names = self._names()
        for key, weight in loaded.items():
            is_master = key.endswith(".w_0")
            table = self.master_weights if is_master else self.model_params
            table[names[key[:-4]] if is_master else key] = weight.local_tensor.clone().flatten()

    def save(self, global_step: int) -> None:
        import paddle.distributed as dist

        directory = f"{self.args.output_dir}/checkpoint-{global_step}/ema_state"
        dist.save_state_dict(self._build_ema_save_sharded_state_dict(), directory)


class NonZCCEMACallback(TrainerCallback):
    """Keeps the averages, and saves them before the trainer saves."""

    def __init__(self, buffer: Averages, assembler: Any) -> None:
        self.buffer, self.assembler = buffer, assembler

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.buffer.ema_accumulate(state.global_step, None, None)
        if state.global_step % args.save_steps == 0:
            self.buffer.save(state.global_step)
