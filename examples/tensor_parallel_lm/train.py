"""The worker of the demo: started once per rank by `paddle.distributed.launch`, one mode per phase.

- train: train, save a checkpoint on the way, and train on
- resume: start from other random weights, load the checkpoint, train on
- reshard: hold a live DP2 x TP2 model and move its state into a TP4 model in the memory of the same processes
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import time
from collections.abc import Iterator

import paddle

from paddle_flexckpt.testing import cpu_world

# Teaches the CPU build of Paddle what it lacks for hybrid-parallel training.  On GPUs this line is not needed.
cpu_world.install()

import paddle.distributed as dist  # noqa: E402
from data import load_corpus, make_batch  # noqa: E402
from model import LanguageModel, ModelConfig, initialize_weights  # noqa: E402
from paddle.distributed import fleet  # noqa: E402
from paddle.distributed.fleet.base import topology as fleet_topology  # noqa: E402
from paddle.distributed.fleet.utils.sequence_parallel_utils import (  # noqa: E402
    register_sequence_parallel_allreduce_hooks,
)
from verify import state_digests  # noqa: E402

import paddle_flexckpt as fc  # noqa: E402

HybridGroup = fleet_topology.HybridCommunicateGroup

BATCH_SIZE = 16
PEAK_LEARNING_RATE = 1e-3
WARMUP_STEPS = 10
LIVE_STEPS = 3


def say(text: str) -> None:
    """Prints one line of progress, once per world; run.py shows the lines that begin with the marker."""
    if dist.get_rank() == 0:
        print(f"demo| {text}", flush=True)


def learning_rate(step: int) -> float:
    """Linear warm-up, then constant: a function of the step, so that there is no scheduler state to save."""
    return PEAK_LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)


@contextlib.contextmanager
def active_topology(hcg: HybridGroup) -> Iterator[None]:
    """Makes `hcg` the topology that fleet's layers, hooks and operators use, for the duration of the block."""
    before = fleet.fleet._hcg, fleet_topology._HYBRID_PARALLEL_GROUP
    fleet.fleet._hcg = fleet_topology._HYBRID_PARALLEL_GROUP = hcg
    try:
        yield
    finally:
        fleet.fleet._hcg, fleet_topology._HYBRID_PARALLEL_GROUP = before


def second_topology(tensor_parallel: int) -> HybridGroup:
    """Creates a pure tensor-parallel topology over the ranks of this world, next to the one of `fleet.init`."""
    names = fleet.fleet._topology.get_hybrid_group_names()
    degrees = [tensor_parallel if name == "model" else 1 for name in names]
    before = fleet_topology._HYBRID_PARALLEL_GROUP
    hcg = HybridGroup(fleet_topology.CommunicateTopology(names, degrees))
    fleet_topology._HYBRID_PARALLEL_GROUP = before  # the constructor installs itself as the current topology
    return hcg


class Trainer:
    """A model, its AdamW and the topology they live in.

    Args:
        hcg: Topology of the model.
        seed: Seed of the initial weights.
    """

    def __init__(self, hcg: HybridGroup, seed: int) -> None:
        self.hcg = hcg
        self.corpus = load_corpus()
        with active_topology(hcg):
            self.model = LanguageModel(ModelConfig(), hcg.get_model_parallel_group())
            initialize_weights(self.model, seed)
            decayed = {param.name for param in self.model.parameters() if len(param.shape) > 1}
            self.optimizer = paddle.optimizer.AdamW(
                learning_rate=learning_rate(0),
                beta2=0.95,
                parameters=self.model.parameters(),
                weight_decay=0.1,
                apply_decay_param_fun=decayed.__contains__,
                grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
            )
            if hcg.nranks > 1:
                register_sequence_parallel_allreduce_hooks(self.model, 1, False)
                self.parallel_model = fleet.distributed_model(self.model)
                self.parallel_optimizer = fleet.distributed_optimizer(self.optimizer)
            else:  # fleet has no wrapper for a world of one process
                self.parallel_model, self.parallel_optimizer = self.model, self.optimizer

    def sharded_state(self) -> dict[str, dist.ShardedWeight]:
        """Returns parameters and AdamW states with their place in the global tensors."""
        with active_topology(self.hcg):
            model_state = self.model.sharded_state_dict()
            return {**model_state, **self.optimizer.sharded_state_dict(model_state)}

    def digests(self) -> dict[str, str]:
        """Returns the digests of all global tensors of the training state."""
        return state_digests(self.model, self.optimizer)

    def _loss(self, step: int) -> paddle.Tensor:
        part, parts = self.hcg.get_data_parallel_rank(), self.hcg.get_data_parallel_world_size()
        tokens, targets = make_batch(self.corpus, step, BATCH_SIZE, self.model.config.seq_len, part, parts)
        return self.parallel_model(paddle.to_tensor(tokens), paddle.to_tensor(targets))

    def _global_loss(self, loss: paddle.Tensor) -> float:
        value = loss.detach().clone()
        if self.hcg.get_data_parallel_world_size() > 1:
            group = self.hcg.get_data_parallel_group()
            dist.all_reduce(value, group=group)
            value = value / group.nranks
        return float(value)

    def evaluate(self, step: int) -> float:
        """Returns the loss of the batch of a step without training on it."""
        with active_topology(self.hcg), paddle.no_grad():
            return self._global_loss(self._loss(step))

    def run(self, first: int, last: int, label: str) -> dict[str, float]:
        """Trains the steps first .. last - 1 and returns the loss of each, by step."""
        losses = {}
        begun = time.perf_counter()
        with active_topology(self.hcg):
            for step in range(first, last):
                self.optimizer.set_lr(learning_rate(step))
                loss = self._loss(step)
                loss.backward()
                self.parallel_optimizer.step()
                self.parallel_optimizer.clear_grad()
                losses[str(step)] = self._global_loss(loss)
                if (step + 1) % 10 == 0 or step in (first, last - 1):
                    pace = (time.perf_counter() - begun) / (step + 1 - first)
                    say(f"{label}: step {step:3d}  loss {losses[str(step)]:.4f}  ({pace:.2f} s per step)")
        return losses


class Results:
    """Files in which a phase leaves what run.py and plot.py need."""

    def __init__(self, folder: pathlib.Path, phase: str) -> None:
        self.folder, self.phase = folder, phase
        folder.mkdir(parents=True, exist_ok=True)

    def write_layout(self, state: dict[str, dist.ShardedWeight], name: str) -> None:
        """Records which part of each tensor this rank holds, as its ShardedWeights tell."""
        layout = {
            key: {
                "global_shape": list(weight.global_shape),
                "local_shape": list(weight.local_shape),
                "global_offset": list(weight.global_offset),
            }
            for key, weight in state.items()
        }
        path = self.folder / f"{name}.layout.rank{dist.get_rank()}.json"
        path.write_text(json.dumps(layout), encoding="utf-8")

    def write(self, **values: object) -> None:
        """Records the outcome of the phase (rank 0 only)."""
        if dist.get_rank() == 0:
            (self.folder / f"{self.phase}.json").write_text(json.dumps(values, indent=1), encoding="utf-8")


def train(args: argparse.Namespace, results: Results) -> None:
    """The uninterrupted run, which saves a checkpoint on its way."""
    degree = dist.get_world_size()
    trainer = Trainer(cpu_world.init_fleet(mp=degree), seed=args.seed)
    held = sum(param.size for param in trainer.model.parameters())
    whole = sum(param.size * (degree if param.is_distributed else 1) for param in trainer.model.parameters())
    seq_len, text_size = trainer.model.config.seq_len, len(trainer.corpus)
    say(f"TP{degree}: {whole:,} parameters, {held:,} of them on each rank")
    say(f"TP{degree}: {BATCH_SIZE} x {seq_len} bytes per step, out of {text_size:,} bytes of Python source")
    losses = trainer.run(0, args.steps_before, f"TP{degree}")
    state = trainer.sharded_state()
    report = fc.save_state_dict(state, str(args.checkpoint))
    say(f"TP{degree}: {report.summary()}")
    results.write_layout(state, results.phase)
    digests = trainer.digests()
    losses |= trainer.run(args.steps_before, args.steps_before + args.steps_after, f"TP{degree} uninterrupted")
    results.write(losses=losses, digests=digests)


def load(args: argparse.Namespace, trainer: Trainer, label: str) -> tuple[dict, dict]:
    """Loads the checkpoint into a fresh trainer; returns the digests right before and right after."""
    state = trainer.sharded_state()  # creates the AdamW states too
    before = trainer.digests()
    report = fc.load_state_dict(state, str(args.checkpoint))
    say(f"{label}: {report.summary()}")
    return before, trainer.digests()


def resume(args: argparse.Namespace, results: Results) -> None:
    """Continues from the checkpoint with as many tensor-parallel ranks as the world has."""
    degree = dist.get_world_size()
    trainer = Trainer(cpu_world.init_fleet(mp=degree), seed=args.seed)
    before, after = load(args, trainer, f"TP{degree}")
    results.write_layout(trainer.sharded_state(), results.phase)
    losses = trainer.run(args.steps_before, args.steps_before + args.steps_after, f"TP{degree} resumed")
    results.write(losses=losses, digests_before_load=before, digests=after)


def reshard(args: argparse.Namespace, results: Results) -> None:
    """Moves the live state of a dp2 x tp2 model into a tp4 model; nothing of it touches the disk."""
    source = Trainer(cpu_world.init_fleet(dp=2, mp=2), seed=args.seed)
    before, loaded = load(args, source, "DP2 x TP2")
    first, middle, last = (args.steps_before + n for n in (0, LIVE_STEPS, 2 * LIVE_STEPS))
    losses = source.run(first, middle, "DP2 x TP2")  # from here on, the state is in no file

    target = Trainer(second_topology(tensor_parallel=4), seed=args.seed + 1)
    source_state, target_state = source.sharded_state(), target.sharded_state()
    live, fresh = source.digests(), target.digests()
    loss_fresh = target.evaluate(middle)
    report = fc.reshard_sharded_state_dict(source_state, target_state)
    say(f"DP2 x TP2 -> TP4 in memory: {report.summary()}")
    results.write_layout(source_state, "live_source")
    results.write_layout(target_state, "live_target")
    moved = target.digests()
    loss_source, loss_target = source.evaluate(middle), target.evaluate(middle)
    say(
        f"loss of the same batch: {loss_source:.7f} as DP2 x TP2, {loss_target:.7f} as TP4 "
        f"(TP4 before the move: {loss_fresh:.7f})"
    )
    source_losses = source.run(middle, last, "DP2 x TP2 goes on")
    target_losses = target.run(middle, last, "TP4 goes on")
    results.write(
        losses=losses,
        digests_before_load=before,
        digests_loaded=loaded,
        digests_live=live,
        digests_fresh=fresh,
        digests=moved,
        loss_source=loss_source,
        loss_target=loss_target,
        loss_fresh=loss_fresh,
        source_losses=source_losses,
        target_losses=target_losses,
    )


def main() -> None:
    """Runs one phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["train", "resume", "reshard"])
    parser.add_argument("--phase", required=True, help="name of the files with the results")
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--steps-before", type=int, required=True)
    parser.add_argument("--steps-after", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True, help="seed of the initial weights")
    args = parser.parse_args()
    fc.install()
    results = Results(args.results, args.phase)
    {"train": train, "resume": resume, "reshard": reshard}[args.mode](args, results)
    if dist.get_world_size() > 1:
        dist.barrier()


if __name__ == "__main__":
    main()
