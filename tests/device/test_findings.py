"""What a simulated device found in the library: views, host tensors beside a device, other streams, the current device.

Traffic in which a rank has nothing to send is in test_reshard_traffic, what crosses the link in test_bounds.
"""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from tests.device import jobs_findings as jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128"])
def test_views_are_saved_and_filled_where_they_are(device_world2, tmp_path, dtype):
    assert device_world2.run(jobs.views, directory=str(tmp_path), dtype=dtype) == [[], []]


def test_strided_host_tensors_beside_a_device(device_world2, tmp_path):
    assert device_world2.run(jobs.host_views, directory=str(tmp_path)) == [[True, True]] * 2


@pytest.mark.parametrize("what", ["save", "async save", "reshard"])
def test_what_another_stream_still_writes_is_waited_for(device_world2, tmp_path, what):
    assert device_world2.run(jobs.unfinished, directory=str(tmp_path), what=what) == [1.0, 1.0]


def test_the_host_may_be_the_current_device(device_world2, tmp_path):
    for answer in device_world2.run(jobs.with_the_host_current, directory=str(tmp_path), mib=1):
        assert answer == ["cpu", True, True]
