"""The order of a run's samples, which continues under any number of ranks."""

from paddle_flexckpt.data.batch_sampler import ElasticBatchSampler
from paddle_flexckpt.data.elastic_stream import ElasticStream

__all__ = ["ElasticBatchSampler", "ElasticStream"]
