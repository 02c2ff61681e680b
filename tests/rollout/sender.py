"""A trainer of one process that pushes to an engine, and is killed at a place that it is told."""

from __future__ import annotations

import os
import signal
import sys

from paddle_flexckpt.loading import pushed_weights, weight_channel
from paddle_flexckpt.rollout import segment, switch
from tests.rollout.numpy_engine import weights

# Where a sender may die by itself: functions of modules, at their beginning and at their end.
PLACES = {
    "open": (segment.SegmentDirectory, "open"),
    "allocate": (segment.SegmentDirectory, "_create"),
    "remove": (segment.SegmentDirectory, "remove"),
    "header": (segment.LocalSink, "write"),
    "pieces": (pushed_weights, "copy_pieces"),
    "plan": (pushed_weights.PushedWeights, "plan"),
    "start": (switch.SwitchProcess, "__init__"),
    "request": (switch.SwitchProcess, "begin"),
    "result": (switch.SwitchProcess, "result"),
    "report": (weight_channel, "PushReport"),
}


def die_at(place: str, end: str) -> None:
    """Have this process killed at the beginning or end of a function."""
    owner, name = PLACES[place]
    function = getattr(owner, name)

    def dying(*arguments: object, **named: object) -> object:
        if end == "after":
            function(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(owner, name, dying)


if __name__ == "__main__":
    url, place, end = sys.argv[1:]
    die_at(place, end)
    weight_channel.WeightChannel(url).push(weights(2), version="2")
