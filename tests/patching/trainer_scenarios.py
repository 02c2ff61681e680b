"""What the patches for the trainers mend or add. Run as a script: LIBRARY, a directory, and names of scenarios.

Prints, for each, what is wrong (or null) as JSON. The packages that are found on the path are the ones that are tried.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from types import SimpleNamespace
from unittest import mock

import numpy as np
import paddle


class Sequences(paddle.io.Dataset):
    """Sixteen sequences of tokens that count up by three."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        tokens = (index + np.arange(9) * 3) % 32
        return {"input_ids": tokens[:-1].astype("int64"), "labels": tokens[1:].astype("int64")}


SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "seq_length": 8, "use_flash_attention": False,
}  # fmt: skip
FLAGS = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True}


def make_trainer(library, directory, trainer=None, **flags):
    """A trainer of a tiny Llama."""
    trainers = importlib.import_module(f"{library}.trainer")
    transformers = importlib.import_module(f"{library}.transformers")
    if library == "paddleformers":
        flags = {"amp_master_grad": False, **flags}
    arguments = trainers.TrainingArguments(output_dir=directory, device="cpu", report_to="none", **{**FLAGS, **flags})
    paddle.seed(arguments.seed)
    config = transformers.LlamaConfig(**SIZES)
    if library == "paddleformers":
        config.fuse_rms_norm = config.apply_rope_fusion = False
        config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM._from_config(config, dtype="float32")
    return (trainer or trainers.Trainer)(model=model, args=arguments, train_dataset=Sequences())


def resumed_as_uninterrupted(library, directory, resume, **flags):
    """Trains four steps, and the last two of them again from a checkpoint: the parameters are the same."""
    first = make_trainer(library, directory, **flags)
    first.train()
    second = make_trainer(library, directory, **flags)
    second.train(resume_from_checkpoint=resume)
    assert second.state.global_step == first.state.global_step == 4
    for (name, wanted), got in zip(first.model.state_dict().items(), second.model.state_dict().values()):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=0, atol=1e-7, err_msg=name)


def resume_in_one_process(library, directory):
    resumed_as_uninterrupted(library, directory, f"{directory}/checkpoint-2")


def resume_from_the_last(library, directory):
    asked = []

    class Asked(importlib.import_module(f"{library}.trainer").Trainer):
        def _load_flex_checkpoint(self, resume_from_checkpoint):
            asked.append(resume_from_checkpoint)
            raise KeyboardInterrupt

    make_trainer(library, directory).train()
    with contextlib.suppress(KeyboardInterrupt):
        make_trainer(library, directory, Asked).train(resume_from_checkpoint=True)
    assert asked == [f"{directory}/checkpoint-4"], asked


def data_parallel_save(library, directory):
    """Of two ranks with the same shard of tensor parallelism both take part."""
    module = importlib.import_module(f"{library}.trainer.trainer")
    trainer = make_trainer(library, directory)
    trainer.lr_scheduler = SimpleNamespace(state_dict=dict)
    for rank in (0, 1):
        trainer.dp_group, calls = SimpleNamespace(rank=rank, nranks=2), []
        trainer._save_flex_optimizer_state = lambda output, calls=calls: calls.append(output)
        trainer.save_model = lambda *arguments: None
        arguments = mock.MagicMock(wraps=trainer.args)
        arguments.use_hybrid_parallel, arguments.use_expert_parallel, arguments.should_save = True, False, False
        arguments.enable_zero_cost_checkpoint = arguments.enable_auto_parallel = arguments.ignore_save_lr_and_optim = (
            False
        )
        arguments.save_rng_states, arguments.data_parallel_size, arguments.save_total_limit = False, 2, None
        arguments.save_checkpoint_format, arguments.optimizer_name_suffix = "flex_checkpoint", None
        arguments.output_dir = arguments.output_signal_dir = directory
        real, trainer.args = trainer.args, arguments
        try:
            with mock.patch.object(module.dist, "barrier"):
                trainer._save_checkpoint(trainer.model)
        finally:
            trainer.args = real
        assert len(calls) == 1, f"the rank {rank} of data parallelism took part {len(calls)} times"


def flexcheckpoint(library, directory):
    """A script that knows nothing of paddle_flexckpt saves and resumes through it, by the flags alone."""
    trainers = importlib.import_module(f"{library}.trainer")
    arguments = ["--save_checkpoint_format", "flex_checkpoint", "--load_checkpoint_format", "flex_checkpoint"]
    arguments += ["--output_dir", directory, "--device", "cpu", "--flex_verify", "full"]
    arguments += ["--amp_master_grad", "false"] if library == "paddleformers" else []
    (parsed,) = trainers.PdArgumentParser((trainers.TrainingArguments,)).parse_args_into_dataclasses(arguments)
    assert parsed.save_checkpoint_format == "flex_checkpoint" and parsed.flex_verify == "full"
    formats = {"save_checkpoint_format": "flex_checkpoint", "load_checkpoint_format": "flex_checkpoint"}
    resumed_as_uninterrupted(library, directory, f"{directory}/checkpoint-2", **formats)
    assert os.path.exists(f"{directory}/checkpoint-4/flex_checkpoint/0.manifest"), os.listdir(
        f"{directory}/checkpoint-4"
    )
    from paddle_flexckpt.trainer import is_installed

    assert is_installed(library)


SCENARIOS = {
    "resume-in-one-process": resume_in_one_process,
    "resume-from-the-last": resume_from_the_last,
    "data-parallel-save": data_parallel_save,
    "flexcheckpoint": flexcheckpoint,
}


def main(library, directory, names):
    paddle.device.set_device("cpu")
    results = {}
    for name in names:
        try:
            SCENARIOS[name](library, os.path.join(directory, name))
            results[name] = None
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            results[name] = f"{type(error).__name__}: {str(error).strip()[:600]} ({last.filename}:{last.lineno})"
            traceback.print_exc()
    print(json.dumps({"library": importlib.import_module(library).__file__, "results": results}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
