"""Write checkpoints by the real DeepSpeed, on two ranks: ``python make_deepspeed.py DIRECTORY STAGE``.

It runs in an interpreter that has torch (CPU) and deepspeed, and imports nothing of this repository. Beside the
checkpoint, ``expected.npz`` has what is in it: the weights in fp32 and the states of Adam, gathered by DeepSpeed's own
functions.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest.mock
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")
RANKS = 2


def _model():
    import torch

    torch.manual_seed(1)
    # 7 * 5 and 5 elements are not divisible by the ranks: there is padding.
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 5), torch.nn.Linear(5, 3, bias=False))
    model[1].register_buffer("scale", torch.arange(5.0))
    return model


def _write(rank: int, directory: str, stage: int, store: str, ranks: int) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    import deepspeed
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    deepspeed.init_distributed("gloo", dist_init_required=False)
    model = _model()
    # Two groups, as with weight decay for matrices alone.
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        loss = engine(torch.randn(4, 6, dtype=torch.bfloat16)).float().pow(2).sum()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(directory, tag="global_step3", client_state={"epoch": 7})
    buffers = {name: buffer.float() for name, buffer in engine.module.named_buffers()}
    dist.barrier()
    if rank == 0:
        _write_expected(directory, buffers)
    dist.barrier()
    dist.destroy_process_group()


def _write_expected(directory: str, buffers: dict) -> None:
    """Gather what is in the checkpoint by DeepSpeed's own converters."""
    import numpy as np
    import torch
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = {**get_fp32_state_dict_from_zero_checkpoint(directory), **buffers}
    tag = os.path.join(directory, "global_step3")
    universal = os.path.join(directory, "universal")
    arguments = ["x", "--input_folder", tag, "--output_folder", os.path.join(universal, "global_step3_universal")]
    with unittest.mock.patch.object(sys, "argv", [*arguments, "--inject_missing_state"]):
        options = ds_to_universal.parse_arguments()
    options.num_extract_workers = options.num_merge_workers = 1
    ds_to_universal.main(options)
    with open(os.path.join(universal, "latest_universal"), "w") as file:
        file.write("global_step3_universal")
    expected = {name: weight.detach().float().numpy() for name, weight in weights.items()}
    for name in set(weights) - set(buffers):
        for state in ("exp_avg", "exp_avg_sq"):
            file = os.path.join(universal, "global_step3_universal", "zero", name, f"{state}.pt")
            value = torch.load(file, weights_only=False)
            value = value["param"] if isinstance(value, dict) else value
            expected[f"{name}.{state}"] = value.reshape(weights[name].shape).numpy()
    np.savez(os.path.join(directory, "expected.npz"), **expected)


def main(directory: str, stage: int, ranks: int = RANKS) -> None:
    """Write the checkpoint."""
    import torch.multiprocessing

    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(_write, (directory, stage, os.path.join(place, "store"), ranks), nprocs=ranks)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:]))
