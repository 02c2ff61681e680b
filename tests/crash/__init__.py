"""Crash safety: savers that die, disks that fail and power that goes, at every system call on files in turn.

:mod:`~tests.crash.file_system` stands between the library and the operating system: it records the calls, and stops the
caller before one of them, or makes one fail. :mod:`~tests.crash.job` runs the ranks of a job one at a time in an order
that a seed decides, so that every point can be met again. :mod:`~tests.crash.power_loss` makes of a recording the disks
that a loss of power may leave. :mod:`~tests.crash.scenarios` says what is done, and what a reader may find;
:mod:`~tests.crash.harness` does it, looks, and saves again. ``make test-crash`` goes through all points
(:mod:`~tests.crash.enumerate`); the tests beside it take samples of them.

That the layer sees every call is proved with strace, and that a stop in the layer is what a kill is, by killing real
processes.
"""
