"""Run a training script that knows nothing of this library, with its flags.

    python -m paddle_flexckpt.trainer.run script.py --save_checkpoint_format flex_checkpoint ...
    python -m paddle_flexckpt.trainer.run -m package.module ...

For many ranks, ``python -m paddle_flexckpt.trainer.launch`` takes the place of ``python -m paddle.distributed.launch``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_LIBRARIES = ("paddlenlp", "paddleformers", "paddlefleet")


class _InstallingLoader(importlib.abc.Loader):
    """A loader that loads a module by the module's own loader, and then calls a function."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)


class InstallOnImport(importlib.abc.MetaPathFinder):
    """A finder that installs this library for PaddleNLP, PaddleFormers or PaddleFleet when its trainer is imported.

    A script may parse its arguments before it imports the trainer: making a parser imports it, so that the flags are
    known. Nothing is imported earlier than that: PaddleFormers' modules import each other in circles.
    """

    def __init__(self) -> None:
        """Find nothing until this is in ``sys.meta_path``."""
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the two modules, as the other finders do."""
        library, _, rest = fullname.partition(".")
        if library not in _LIBRARIES or rest not in ("trainer.trainer", "trainer.argparser") or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _InstallingLoader(spec.loader, _install if rest == "trainer.trainer" else _parse_later)
        return spec


def _install(module: ModuleType) -> None:
    from paddle_flexckpt.trainer.installation import install

    install(module.__name__.partition(".")[0])


def _parse_later(module: ModuleType) -> None:
    """Wrap the class of argument parsers: to make one first imports the trainer, and with it installs the flags."""
    parser: Any = module.__dict__["PdArgumentParser"]
    library, make = module.__name__.partition(".")[0], parser.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        importlib.import_module(f"{library}.trainer.trainer")
        make(self, *args, **kwargs)

    parser.__init__ = __init__


def main(arguments: list[str] | None = None) -> None:
    """Run the script or the module with the rest of the command line."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help") or given == ["-m"]:
        raise SystemExit(__doc__)
    sys.meta_path.insert(0, InstallOnImport())
    if given[0] == "-m":
        sys.argv = given[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = given
        # As for `python script.py`: imports are looked up beside the script. A launcher puts this file's place there.
        here = os.path.dirname(os.path.abspath(__file__))
        sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
        sys.path.insert(0, os.path.dirname(os.path.abspath(given[0])))
        runpy.run_path(given[0], run_name="__main__")


if __name__ == "__main__":
    main()
