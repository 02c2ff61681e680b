"""The order of a run's samples, which continues under any number of ranks."""

from paddle_flexckpt.data.batch_sampler import ElasticBatchSampler

__all__ = ["ElasticBatchSampler"]
