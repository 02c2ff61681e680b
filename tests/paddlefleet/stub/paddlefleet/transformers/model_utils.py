"""Base classes of the imitated library's models."""

from __future__ import annotations

from typing import Any

import paddle


class PretrainedModel(paddle.nn.Layer):
    config: Any = None


class PipelinePretrainedModel(PretrainedModel):
    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().sharded_state_dict(*args, **kwargs)
