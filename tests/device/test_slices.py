"""Slices of a save from a device: on a stream of their own, beside other work, and that a step in between is noticed.

The jobs: what each rank runs.
"""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from tests.device import plugin
from tests.device.test_saves import MIB, is_equal, leftovers, locked, own, words

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
SLICE = 2 * MIB

# -- what each rank runs -----------------------------------------------------------------------------------------------


def save_in_slices(directory):
    """A save in slices while the device does only what somebody waits for."""
    before, writer = locked(), fc.BackgroundWriter()
    large = words(7 * MIB, 0)
    state = own({"a": large, "b": words(3 * MIB + 4, 1), "c": large.reshape([1024, -1]).t()[3:9]})
    handle = fc.save_state_dict(state, directory, async_save=writer, slice_bytes=SLICE)
    plugin.reset()
    plugin.configure(lazy=1)
    try:
        for _ in range(3):
            handle.stage_next()
        begun = plugin.stats()
        # A micro-step, which waits for its own stream: that does none of the copies.
        micro = float(paddle.ones([8]).sum())
        after = plugin.stats()["d2h"]
        handle.finish_staging()
    finally:
        plugin.configure(lazy=0)
    spans = [span for span in plugin.spans() if span.what == "d2h"]
    handle.result()
    writer.close()
    return {
        "copied by slices": begun["d2h"]["bytes"],
        "asked for": begun["asynchronous"],
        "micro": [micro, after["bytes"]],
        "streams": len({span.stream for span in spans if span.nbytes == SLICE}),
        "pageable": sum(span.nbytes for span in spans if span.pageable and span.nbytes > 4096),
        "right": is_equal(state, directory),
        "left": leftovers(before),
    }


def step_too_early(directory, hooked):
    """A real optimizer steps before the save is staged, or its hook finishes that first."""
    paddle.seed(dist.get_rank())
    model = paddle.nn.Linear(256, 256)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters(), learning_rate=0.1)
    state = own(model.state_dict())
    was = {key: tensor.clone() for key, tensor in state.items()}
    with fc.BackgroundWriter() as writer:
        handle = fc.save_state_dict(state, directory, async_save=writer, slice_bytes=4096)
        if hooked:
            handle.finish_before(optimizer)
        for _ in range(2):
            model(paddle.ones([2, 256])).sum().backward()
            handle.stage_next() if not hooked else None
        optimizer.step()
        changed = any(bool((state[key] != was[key]).any()) for key in state)
        try:
            handle if hooked else handle.finish_staging()
            handle.result()
        except fc.ValidationError as error:
            return changed, str(error)
    return changed, is_equal(was, directory)


# -- what comes of it --------------------------------------------------------------------------------------------------


def test_slices_are_begun_on_a_stream_of_their_own(device_world2, tmp_path):
    for made in device_world2.run(save_in_slices, directory=str(tmp_path)):
        # The calls came back before anything had crossed.
        assert made["copied by slices"] == 0
        assert made["asked for"] == 3
        assert made["micro"][0] == 8.0
        assert made["micro"][1] <= 4096
        assert made["streams"] == 1
        assert made["pageable"] == 0
        assert made["right"] is True
        assert made["left"] == [[], 0]


def test_a_step_before_the_end_of_staging_is_an_error_on_every_rank(device_world2, tmp_path):
    answers = device_world2.run(step_too_early, directory=str(tmp_path), hooked=False)
    assert [changed for changed, _ in answers] == [True, True]
    (said,) = {said for _, said in answers}
    assert (
        "changed while the save was staged in slices. Remedy (FC506): call finish_staging() before optimizer.step(),"
        in said
    )
    assert not list(tmp_path.glob("*.manifest"))


def test_the_hook_of_the_optimizer_ends_staging_first(device_world2, tmp_path):
    assert device_world2.run(step_too_early, directory=str(tmp_path), hooked=True) == [[True, True]] * 2
