"""The order of a trainer's samples as one position, which each checkpoint has (``--flex_data_position``).

The trainer's loop counts batches before anything is restored, and knows no position. So its epochs are of a fixed
number of whole steps, and it skips nothing when it resumes: the sampler goes on at its position.

Tested in tests/trainer/test_data_position.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.data import ElasticBatchSampler


class TrainSampler(ElasticBatchSampler):
    """The sampler of a trainer's training batches, under any number of ranks.

    An epoch of the trainer is the least number of whole steps that have each sample. The last of them goes on with the
    first samples of the next shuffle, which are not repeated.
    """

    def __init__(self, trainer: Any, shuffle: bool = True) -> None:
        """Begin at the first sample of the trainer's ``train_dataset``; errors of the base class."""
        args = trainer.args
        ranks = int(args.dataset_world_size), int(args.dataset_rank)
        super().__init__(trainer.train_dataset, args.per_device_train_batch_size, *ranks, shuffle, seed=args.seed)
        self._trainer = trainer

    def _epoch(self) -> tuple[int, int]:
        """Return the steps of an epoch of the trainer, and the batches of a step."""
        batches = int(self._trainer.args.gradient_accumulation_steps)
        return -(-self._length // (self.global_batch_size * batches)), batches

    def __len__(self) -> int:
        """Return the number of batches of an epoch of the trainer, wherever the position is."""
        steps, batches = self._epoch()
        return steps * batches

    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches of the steps that the trainer has left of its epoch."""
        self._is_unfollowed = True
        steps, batches = self._epoch()
        return self._draw(self.position, (steps - self._trainer.state.global_step % steps) * batches)


def sampler_of(loader: Any) -> TrainSampler:
    """Return the sampler of a trainer's loader, whose position is saved.

    Raises:
        ValidationError: The loader has another one, or none; or there is no loader.
    """
    import paddle

    if isinstance(getattr(loader, "dataset", None), paddle.io.IterableDataset):
        raise ValidationError(
            "--flex_data_position: the training data is an IterableDataset, whose samples have no numbers. Remedy "
            "(FC905): leave the flag out; a loop of your own can train on a fc.ElasticStream, which has a position"
        )
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, TrainSampler):
        return sampler
    raise ValidationError(
        f"--flex_data_position: the training batches come from a {type(sampler).__name__}, which has no position. "
        "Remedy (FC905): return paddle_flexckpt.trainer.TrainSampler(self) from the trainer's _get_train_sampler() "
        "(with shuffle=False in the data's order), and leave get_train_dataloader() to the library; or leave the flag "
        "out"
    )
