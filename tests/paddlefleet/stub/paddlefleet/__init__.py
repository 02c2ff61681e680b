"""An imitation of PaddleFleet's trainer: the methods, flags and order of calls that were read, and nothing of its code.

PaddleFleet needs a GPU and cannot be installed where these tests run. What is here was written after its sources of
September 2026 (github.com/PaddlePaddle/PaddleFleet, src/paddlefleet/trainer), which docs/trainer.md names.
"""

__version__ = "0.0.0+imitated"
