"""Jobs of test_readme: code of the README, as printed."""

from __future__ import annotations

import contextlib
import io
import os


def run(code, directory):
    """What a script prints on this rank, in a directory of its own."""
    printed, before = io.StringIO(), os.getcwd()
    os.chdir(directory)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return printed.getvalue()
