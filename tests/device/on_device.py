"""A plugin of pytest: tests written for the host run with a simulated device current. See ``tests.device.suites``.

1. Before each test ``rehearsal:0`` is made current: tensors that name no place are on it.
2. After each, the device's counters are looked at: a host access to device memory, or a use of freed memory, is a
   failure.
3. What cannot pass is listed, with a reason, in :mod:`tests.device.exceptions`, and expected to fail: an entry whose
   test passes, or which names no test, is a failure of the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.device import plugin
from tests.device.exceptions import EXCEPTIONS, exception_of

MISUSES = ("host_touches", "freed_uses")


def pytest_configure(config: pytest.Config) -> None:
    import paddle

    os.environ["REHEARSED_DEVICE"] = f"{plugin.DEVICE_TYPE}:0"  # for tests that name their device
    paddle.set_device(f"{plugin.DEVICE_TYPE}:0")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    used = set()
    for item in items:
        found = exception_of(item.nodeid)
        if found is not None:
            used.add(found.name)
            item.add_marker(pytest.mark.xfail(reason=f"{found.kind}: {found.reason}", run=found.run, strict=True))
    files = {item.nodeid.partition("::")[0] for item in items}
    # A run of single tests cannot tell.
    whole = not any("::" in argument for argument in config.args) and not config.option.keyword
    stale = [each.name for each in EXCEPTIONS if each.name not in used and each.name.partition("::")[0] in files]
    if whole and stale:
        raise pytest.UsageError("tests.device.exceptions names what is not there: " + ", ".join(stale))


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    import paddle

    paddle.set_device(f"{plugin.DEVICE_TYPE}:0")
    before = plugin.stats()
    yield
    paddle.set_device(f"{plugin.DEVICE_TYPE}:0")
    paddle.device.synchronize()
    after = plugin.stats()
    wrong = {name: after[name] - before[name] for name in MISUSES if after[name] != before[name]}
    assert not wrong, f"device memory was misused: {wrong}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counters = plugin.stats()
    terminalreporter.write_line(
        f"device: {counters['guarded_calls_ever']} guarded calls, {counters['host_touches']} host touches, "
        f"{counters['freed_uses']} uses of freed memory"
    )
