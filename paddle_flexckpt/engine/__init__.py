"""Plans at work on numpy arrays: what a load fills and computes, piece by piece, and whole tensors without Paddle.

Knows neither Paddle nor how ranks talk to each other: ``live`` puts live tensors and collectives around it.
"""

from paddle_flexckpt.engine.export import export_safetensors
from paddle_flexckpt.engine.verification import repair_manifest, verify_checkpoint
from paddle_flexckpt.engine.whole_tensors import iterate_tensors

__all__ = ["export_safetensors", "iterate_tensors", "repair_manifest", "verify_checkpoint"]
