"""Exit status: how a process that is ending already ends with status 1."""

from __future__ import annotations

import ctypes


def end_with_status_1() -> None:
    """Makes the interpreter, which is exiting, end with status 1.

    What an atexit function raises does not change the status, and ``os._exit`` would skip the atexit functions that are
    still to come. So ``_exit(1)`` becomes the last of the C library's own exit functions that runs: the interpreter
    has run all of its atexit functions and flushed its streams by then.
    """
    libc = ctypes.CDLL(None)
    # They run in reverse order: C streams are flushed, then the process ends.
    for function, argument in ((libc._exit, 1), (libc.fflush, None)):
        libc.__cxa_atexit(ctypes.cast(function, ctypes.c_void_p), ctypes.c_void_p(argument), None)
