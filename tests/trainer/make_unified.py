"""Makes tests/trainer/data: unified checkpoints of a tiny Llama by PaddleNLP 3.0.0b4 itself, and what they hold.

::

    python -m tests.trainer.make_unified tests/trainer/data

Each case trains for two steps on a CPU, or fills a half-precision model and its optimizer states with values made of
their names (the CPU build has no half-precision kernels), and has PaddleNLP write its checkpoint. What the ranks hold
is written down beside it by the ranks, and merged here: ``expected.json`` has, for every key, its element type, its
shape and the beginning of the sha256 of its bytes. Nothing of what writes it reads a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CONFIG = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "seq_length": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_flash_attention": False,
}
FUSED = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}
TP2 = ["--tensor_parallel_degree", "2"]
PP2 = [
    "--pipeline_parallel_degree",
    "2",
    "--gradient_accumulation_steps",
    "2",
    "--pipeline_parallel_config",
    "disable_partial_send_recv",
]
SHARDING2 = ["--sharding", "stage1", "--sharding_parallel_degree", "2"]
SPLIT = "ignore_merge_optimizer"
# Ranks, the model's configuration, half precision, the trainer's arguments, unified_checkpoint_config.
CASES: dict[str, tuple[int, dict[str, Any], bool, list[str], str]] = {
    "single": (1, {}, False, [], ""),
    "single_tied": (1, {"tie_word_embeddings": True}, False, [], ""),
    "tp2": (2, {}, False, TP2, ""),
    "tp2_fused": (2, FUSED, False, TP2, ""),
    "tp2_tied": (2, {"tie_word_embeddings": True}, False, TP2, ""),
    "tp2_split": (2, {}, False, TP2, SPLIT),
    "tp2_split_fused": (2, FUSED, False, TP2, SPLIT),
    "pp2": (2, {"num_hidden_layers": 2}, False, PP2, ""),
    "pp2_split": (2, {"num_hidden_layers": 2}, False, PP2, SPLIT),
    "sharding2": (2, {}, False, SHARDING2, ""),
    "sharding2_split": (2, {}, False, SHARDING2, SPLIT),
    "lora": (1, {}, False, [], ""),
    "half": (1, {}, True, [], ""),
    "half_tp2": (2, FUSED, True, TP2, ""),
    "half_tp2_split": (2, {}, True, TP2, SPLIT),
    "half_tp2_skip": (2, {}, True, TP2, "skip_save_model_weight"),
    "half_tp2_removed": (2, {}, True, TP2, "remove_master_weight"),
}
_KEPT = (".safetensors", ".index.json", "lora_config.json", "trainer_state.json", "scheduler.pdparams")
_TYPES = ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")
_MASTER = "fp32_master_0"


def main(output: Path, names: list[str]) -> None:
    """Makes the given cases, or all."""
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as scratch:
            shutil.rmtree(output / name, ignore_errors=True)
            _launch(name, Path(scratch))
            _keep(name, Path(scratch), output / name)
        print(name, sum(file.stat().st_size for file in (output / name).iterdir()), "bytes", flush=True)


def _launch(name: str, scratch: Path) -> None:
    ranks = CASES[name][0]
    program = [sys.executable]
    if ranks > 1:
        program += [
            "-m",
            "paddle.distributed.launch",
            "--nproc_per_node",
            str(ranks),
            "--log_dir",
            str(scratch / "log"),
        ]
    # With its file's name the launcher finds it; the package is found by its parent.
    root = Path(__file__).resolve().parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environment["PYTHONPATH"] = f"{root}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*program, __file__, "--worker", name, str(scratch)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        logs = "".join(file.read_text()[-3000:] for file in sorted((scratch / "log").glob("workerlog.*")))
        raise RuntimeError(f"{name} failed: {done.stdout[-3000:]}{done.stderr[-3000:]}{logs}")


def _keep(name: str, scratch: Path, output: Path) -> None:
    """Copies what a checkpoint consists of, and writes down what it holds."""
    (checkpoint,) = (scratch / "out").glob("checkpoint-*")
    output.mkdir(parents=True)
    for file in sorted(checkpoint.iterdir()):
        if file.name.endswith(_KEPT):
            shutil.copyfile(file, output / file.name)
    ranks = [np.load(file, allow_pickle=False) for file in sorted(scratch.glob("rank*.npz"))]
    expected = {}
    for key in sorted({key for rank in ranks for key in rank}):
        if key.startswith("axis:"):
            continue
        shards = [rank[key] for rank in ranks if key in rank]
        array = shards[0]
        axis = next((int(rank[f"axis:{key}"]) for rank in ranks if f"axis:{key}" in rank), -1)
        if axis >= 0 and "gate_up_fused" in key:
            # A rank has its part of the gate, then its part of up.
            halves = [np.split(shard, 2, axis) for shard in shards]
            array = np.concatenate([half for part in zip(*halves) for half in part], axis)
        elif axis >= 0:
            array = np.concatenate(shards, axis)
        dtype = str(array.dtype)
        if dtype.startswith("|V"):  # numpy's files do not know the type
            array, dtype = array.view(ml_dtypes.bfloat16), "bfloat16"
        expected[key] = [dtype, list(array.shape), _digest(array)]
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in expected.items()]
    (output / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def worker(name: str, scratch: Path) -> None:
    """One rank: makes the checkpoint, and writes down what it holds of it."""
    from paddle_flexckpt.testing import cpu_world

    ranks, config, half, arguments, option = CASES[name]
    if ranks > 1:
        cpu_world.install()
    import paddle
    from paddlenlp.trainer import PdArgumentParser, Trainer, TrainingArguments

    options = ["--output_dir", str(scratch / "out"), "--device", "cpu", "--max_steps", "2", "--save_steps", "2"]
    options += ["--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "1", "--learning_rate", "1e-3"]
    options += ["--unified_checkpoint", "1", "--unified_checkpoint_config", option, *arguments]
    (args,) = PdArgumentParser((TrainingArguments,)).parse_args_into_dataclasses(options)
    paddle.set_device("cpu")
    paddle.seed(1)
    model = _model({**CONFIG, **config}, args, half, name == "lora")
    if half:
        optimizer = _States(model)
        _save_states(model, optimizer, args, scratch)
        inner = model
    else:
        trainer = Trainer(model=model, args=args, train_dataset=_data())
        trainer.train()
        inner, optimizer = trainer.model, trainer.optimizer
    held = _held(inner, optimizer, lora=name == "lora")
    np.savez(scratch / f"rank{paddle.distributed.get_rank()}.npz", **held)
    if ranks > 1:
        paddle.distributed.barrier()


def _model(config: dict[str, Any], args: Any, half: bool, lora: bool) -> Any:
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM, LlamaForCausalLMPipe

    made = LlamaConfig(**config)
    for name, value in config.items():  # its constructor forgets some of them
        setattr(made, name, value)
    made.tensor_parallel_degree = max(args.tensor_parallel_degree, 1)
    made.tensor_parallel_rank = max(args.tensor_parallel_rank, 0)
    kind = LlamaForCausalLMPipe if args.pipeline_parallel_degree > 1 else LlamaForCausalLM
    model = kind._from_config(made, dtype="bfloat16" if half else "float32")
    if lora:
        from paddlenlp.peft import LoRAConfig, LoRAModel

        model = LoRAModel(
            model, LoRAConfig(target_modules=[".*q_proj.*", ".*v_proj.*"], r=2, lora_alpha=4, dtype="float32")
        )
        model.mark_only_lora_as_trainable()
    return model


def _data() -> Any:
    import paddle

    class Sequences(paddle.io.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            ids = (index + np.arange(9) * 3) % CONFIG["vocab_size"]
            return {"input_ids": ids[:-1].astype("int64"), "labels": ids[1:].astype("int64")}

    return Sequences()


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values that only this tensor has, of its whole."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)


def _axis(parameter: Any) -> int | None:
    import paddle

    if not getattr(parameter, "is_distributed", False) or paddle.distributed.get_world_size() == 1:
        return None
    return int(parameter.split_axis)


def _part(name: str, parameter: Any) -> np.ndarray:
    """This rank's part of :func:`_values`."""
    import paddle

    axis, shape = _axis(parameter), [int(extent) for extent in parameter.shape]
    if axis is None:
        return _values(name, tuple(shape))
    ranks, rank = paddle.distributed.get_world_size(), paddle.distributed.get_rank()
    shape[axis] *= ranks
    whole = _values(name, tuple(shape))
    if "gate_up_fused" in name:
        gate, up = np.split(whole, 2, axis)
        return np.concatenate([np.split(gate, ranks, axis)[rank], np.split(up, ranks, axis)[rank]], axis)
    return np.split(whole, ranks, axis)[rank]


class _States:
    """An optimizer of a half-precision model, by what PaddleNLP asks of one: its states."""

    _multi_precision = True

    def __init__(self, model: Any) -> None:
        import paddle

        self.states: dict[str, Any] = {"master_weights": {}}
        for name, parameter in model.state_dict().items():
            master = _part(name, parameter)
            if "norm" in name:  # kept in single precision, as gates and norms often are
                whole = paddle.to_tensor(master)
                parameter._clear_data()
                whole._share_buffer_to(parameter)
                prefix = parameter.name
            else:
                parameter.set_value(paddle.to_tensor(master).cast("bfloat16"))
                self.states["master_weights"][parameter.name] = paddle.to_tensor(master)
                prefix = f"{parameter.name}_{_MASTER}"
            for kind in _TYPES[:2]:
                self.states[f"{prefix}_{kind}"] = paddle.to_tensor(_part(f"{name}/{kind}", parameter))
            for kind in _TYPES[2:]:
                self.states[f"{prefix}_{kind}"] = paddle.to_tensor(_values(f"{name}/{kind}", (1,)))

    def state_dict(self) -> dict[str, Any]:
        return self.states


def _save_states(model: Any, optimizer: _States, args: Any, scratch: Path) -> None:
    from paddlenlp.trainer.unified_checkpoint import UnifiedCheckpointHandler

    args.bf16 = True
    handler = UnifiedCheckpointHandler(args)
    output = str(scratch / "out" / "checkpoint-2")
    os.makedirs(output, exist_ok=True)
    handler.save_unified_checkpoint(model, optimizer, output)
    handler.save_unified_optimizer(model, optimizer, output, None)


def _held(model: Any, optimizer: Any, lora: bool) -> dict[str, np.ndarray]:
    """This rank's part of every tensor under this library's names, and ``axis:{name}`` where it is cut."""
    import paddle

    held: dict[str, np.ndarray] = {}
    states = model.model.state_dict() if lora else model.state_dict()
    states = {name: value for name, value in states.items() if not (lora and value.stop_gradient)}
    accumulators = dict(optimizer.state_dict())
    masters = accumulators.pop("master_weights", None) or {}

    def add(key: str, value: Any, parameter: Any) -> None:
        array = value.numpy()
        held[key] = array.view(ml_dtypes.bfloat16) if value.dtype == paddle.bfloat16 else array
        axis = _axis(parameter)
        if axis is not None and array.shape == tuple(parameter.shape):
            held[f"axis:{key}"] = np.asarray(axis)

    for name, parameter in states.items():
        add(name, parameter, parameter)
        if parameter.name in masters:
            add(f"{name}.w_0", masters[parameter.name], parameter)
        for prefix in (parameter.name, f"{parameter.name}_{_MASTER}"):
            for kind in _TYPES:
                if f"{prefix}_{kind}" in accumulators:
                    add(f"{name}.{kind}", accumulators[f"{prefix}_{kind}"], parameter)
    return held


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(sys.argv[2], Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
