"""The contents of a trainer's checkpoint: shards, moving averages, small files, weights in another format.

PaddleFormers and PaddleFleet average the weights (``--zcc_save_ema_coef``). Their callback keeps the averages on the
host and writes them beside the checkpoint, before that is saved. Here they are shards of the checkpoint itself, a part
of its extra state. So there is one commit for both, the averages are restored under any strategy, and a run without
averages ignores them. Averages in the libraries' own directories are restored in the same way.

Tested in tests/trainer/test_trainer.py, tests/paddleformers/test_ema.py and tests/paddlefleet/test_directories.py.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paddle_flexckpt.catalog import EXTRA_STATE, Problem, ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.paddle_checkpoint import EMA_DIRECTORY, paddle_ids
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.media.removals import remove
from paddle_flexckpt.parallel.install import optimizer_sharded_state_dict
from paddle_flexckpt.parallel.layers import build_overlap_buffers
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.sharded_weight import ShardedStateDict
from paddle_flexckpt.tools.export import export_safetensors
from paddle_flexckpt.trainer.directories import SUBDIRECTORY
from paddle_flexckpt.trainer.flags import TrainerOptions
from paddle_flexckpt.trainer.model_rules import describe_model

logger = logging.getLogger("paddle_flexckpt")

# Wrappers that train a few parameters beside a frozen model.
_PEFT_CLASSES = frozenset({"LoRAModel", "PrefixModelForCausalLM", "VeRAModel", "LoKrModel", "ReFTModel"})
# Such a wrapper also saves these parts without gradients: scales of quantized layers.
_PEFT_BUFFERS = ("activation_quanter", "weight_quanter")
_EXPORTED = "huggingface"
# Names of the trainer's and this library's own files, which are not exported.
_OWN = ("trainer_state", "flex_checkpoint")
EMA_PREFIX = f"{EXTRA_STATE}ema."
# The prefix of the keys of averages that are read from the libraries' own directories.
EMA_PREFIX_IN_DIRECTORY = f"{EMA_DIRECTORY}."
# The methods that are used of the callback's buffer of averages.
_NEEDED = ("_build_ema_save_sharded_state_dict", "_fc_to_buffer_format", "save", "ema_accumulate")


def is_peft(model: Any) -> bool:
    """Return whether a model trains a few parameters beside a frozen model, which is not saved."""
    return any(cls.__name__ in _PEFT_CLASSES for cls in type(model).__mro__)


def is_semi_automatic(trainer: Any) -> bool:
    """Return whether a trainer is that of ``--enable_auto_parallel``."""
    return bool(getattr(trainer.args, "enable_auto_parallel", False))


def _static_shards(trainer: Any) -> ShardedStateDict | None:
    """Return all shards of a static model (semi-automatic, ``--to_static``); None if the trainer has none.

    The model's program holds parameters and optimizer states together. It is built here if it does not exist yet.
    """
    model = trainer.model_wrapped
    if not is_semi_automatic(trainer) or model is trainer.model:
        return None
    if model._mode is None:
        model.train()  # builds the program, and with it the states
    shards: ShardedStateDict = model.sharded_state_dict()
    return shards


def model_shards(trainer: Any) -> ShardedStateDict:
    """Return the shards of the trainer's model: all, or those that a parameter-efficient wrapper trains.

    Raises:
        ValueError: A layer cannot be described.
        ValidationError: Such a wrapper trains nothing.
    """
    static = _static_shards(trainer)
    if static is not None:
        return {key: static[key] for key in trainer.model_wrapped._structured_to_parameter_name if key in static}
    build_overlap_buffers(getattr(trainer, "model_wrapped", None))
    shards = describe_model(trainer.model)
    if not is_peft(trainer.model):
        return shards
    trained = {
        key: weight
        for key, weight in shards.items()
        if not weight.local_tensor.stop_gradient or any(name in key for name in _PEFT_BUFFERS)
    }
    if not trained:
        raise ValidationError(
            Problem(
                f"a {type(trainer.model).__name__} without parameters that are trained has nothing to save",
                got=f"{len(shards)} frozen tensors",
                code="FC103",
                remedy="call its mark_only_..._as_trainable() before the training",
            )
        )
    return trained


def collect_shards(trainer: Any, with_optimizer: bool) -> dict[str, Any]:
    """Return the shards of model and, if asked for, optimizer; errors of :func:`model_shards`."""
    static = _static_shards(trainer) if with_optimizer else None
    if static is not None:
        return dict(static)
    model = model_shards(trainer)
    shards: dict[str, Any] = dict(model)
    if with_optimizer and trainer.optimizer is not None:
        shards.update(optimizer_sharded_state_dict(trainer.optimizer, dict(model)))
    return shards


def write_small_files(trainer: Any, directory: Path) -> None:
    """Write configurations and tokenizer.

    The trainer's own checkpoints also have ``training_args.bin``, a pickle that no trainer reads.
    """
    open_backend(directory).make_directory()
    model = trainer.model
    for name, wanted in (("tokenizer", getattr(trainer.args, "save_tokenizer", True)), ("processing_class", True)):
        tokenizer: Any = getattr(trainer, name, None)
        if wanted and callable(getattr(tokenizer, "save_pretrained", None)):
            tokenizer.save_pretrained(str(directory))
    if is_peft(model):
        for name in ("lora_config", "prefix_config", "vera_config", "lokr_config", "reft_config"):
            config = getattr(model, name, None)
            if config is not None:
                config.save_pretrained(str(directory))
    inner = getattr(model, "model", model) if is_peft(model) else model
    if callable(getattr(getattr(inner, "config", None), "save_pretrained", None)):
        _write_config(inner, directory)


def _write_config(model: Any, directory: Path) -> None:
    """Write a model's configuration as that of the whole model: the checkpoint has no degree of parallelism."""
    config = copy.deepcopy(model.config)
    parameters = [parameter for parameter in model.parameters() if "float" in str(parameter.dtype)]
    if parameters:
        config.dtype = str(parameters[0].dtype).split(".")[-1]
    config.architectures = [type(model).__name__.removesuffix("Pipe")]
    for name, value in (("tensor_parallel_degree", 1), ("tensor_model_parallel_size", 1), ("tensor_parallel_rank", 0)):
        if hasattr(config, name):
            setattr(config, name, value)
    config.save_pretrained(str(directory))
    if callable(getattr(model, "can_generate", None)) and model.can_generate():
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(str(directory))


def export_weights(directory: Path, aoa_config: Mapping[str, Any] | None) -> None:
    """Write the weights of a complete checkpoint as safetensors with Hugging Face's names, by these statements to them.

    They go to ``{directory}/huggingface``, which exists once it is complete; configuration and tokenizer are copied
    beside them. One process does it.

    Raises:
        ValidationError: The statements do not fit; nothing was written.
        OSError: The file system refused; likewise.
    """
    unfinished, output = directory / f"{_EXPORTED}.unfinished", directory / _EXPORTED
    for path in (unfinished, output):
        remove(path, "tree")
    try:
        export_safetensors(directory / SUBDIRECTORY, unfinished, aoa_config)
        for path in sorted(directory.iterdir()):
            if path.is_file() and path.suffix in (".json", ".txt", ".model") and not path.name.startswith(_OWN):
                shutil.copyfile(path, unfinished / path.name)
        unfinished.rename(output)
        open_backend(directory).sync()
    except BaseException:
        with contextlib.suppress(OSError):
            remove(unfinished, "tree")
        raise


class AverageState:
    """The averages of one trainer, to be saved and restored."""

    def __init__(self, buffer: Any) -> None:
        """Take over a buffer of the trainer's callback, which then saves nothing itself."""
        missing = [name for name in _NEEDED if not callable(getattr(buffer, name, None))]
        if missing:
            raise ValidationError(
                Problem(
                    f"the averages of the weights are in a {type(buffer).__name__} without {', '.join(missing)}",
                    expected="that of PaddleFormers 1.2.0 or PaddleFleet",
                    code="FC905",
                    remedy="leave --zcc_save_ema_coef out, and train without averages",
                ),
                "cannot save moving averages",
            )
        self._buffer = buffer
        buffer.save = _save_nothing

    def shards(self, shards: Mapping[str, Any]) -> dict[str, Any]:
        """Return the averages as shards, split as those of model and optimizer; none before the first update."""
        if not (self._buffer.master_weights or self._buffer.model_params):
            return {}
        averages = self._buffer._build_ema_save_sharded_state_dict()
        return {EMA_PREFIX + key: _average_of(shards[key], weight.local_tensor) for key, weight in averages.items()}

    def targets(self, shards: Mapping[str, Any], prefix: str = EMA_PREFIX) -> dict[str, Any]:
        """Return fresh tensors: there is an average of each master weight and of each float32 parameter."""
        import paddle

        model, targets = self._buffer.model.state_dict(), {}
        for key, weight in shards.items():
            tensor = weight.local_tensor
            if key.endswith(".w_0") or (key in model and tensor.dtype == paddle.float32):
                targets[prefix + key] = _average_of(weight, paddle.zeros(tensor.shape, dtype="float32"), prefix)
        return targets

    def restore(
        self,
        path: str,
        prefix: str,
        describe: Callable[[], Mapping[str, Any]],
        comm: Communicator,
        options: TrainerOptions,
    ) -> bool:
        """Fill the averages from a checkpoint, by keys with the prefix; return whether it has averages.

        Raises:
            ValidationError: They do not fit.
            CorruptCheckpointError: They are damaged.
        """
        context = f"cannot restore the moving averages from {path}"

        def look() -> tuple[None, bytes]:
            if comm.position != 0:
                return None, b""
            found = any(key.startswith(prefix) for key in SourceDirectory(path).read_manifest().catalog.keys)
            if found and options.aoa_config is not None:
                remedy = "resume without --aoa_config; or without --zcc_save_ema_coef, which leaves them behind"
                raise ValidationError([f"--aoa_config does not apply to moving averages. Remedy (FC905): {remedy}"])
            return None, b"found" if found else b""

        if not comm.together(look, context)[1][0]:
            return False
        targets, _ = comm.together(lambda: (self.targets(describe(), prefix), b""), context)
        load_state_dict(targets, path, comm, strict="missing", verify=options.verify)
        self._buffer._fc_to_buffer_format({key[len(prefix) :]: weight for key, weight in targets.items()})
        return True


def average_state(trainer: Any) -> AverageState:
    """Return the averages of a trainer whose callback has just been added; errors of :class:`AverageState`."""
    return AverageState(getattr(trainer.callback_handler.callbacks[-1], "buffer", None))


def has_averages(directory: str) -> bool:
    """Return whether a directory of the libraries' own format has averages with metadata."""
    return bool(paddle_ids(os.path.join(directory, EMA_DIRECTORY)))


def _average_of(weight: Any, values: Any, prefix: str = EMA_PREFIX) -> Any:
    """Return a shard of the place of ``weight`` with the values of its average."""
    average = copy.copy(weight)
    average.key, average.local_tensor, average.aliases = prefix + weight.key, values, ()
    return average


def _save_nothing(global_step: int) -> None:
    """Save nothing, in place of the buffer's ``save``: the averages are shards of the checkpoint of the same step."""
