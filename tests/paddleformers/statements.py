"""Print the AOA statements of PaddleFormers' models as JSON: what each class says of a small configuration.

    python -m tests.paddleformers.statements < requests.json

Requests are ``{family: {"module", "class", "config"}}``. Most modules import ``paddlefleet``, which needs a GPU. Where
that is so, its import is imitated: its classes are empty, so that modules can be imported and no model can be built.
The functions that make the statements are PaddleFormers' own, and ask the class and the configuration alone.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGES = ("paddlefleet", "paddlefleet_ops")


class Enumeration(type):
    """A class that has every name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Imitated(types.ModuleType):
    """A module that has every name: a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kind = Enumeration if self.__name__.endswith(".enums") else type
        made = kind(name, (), {"__module__": self.__name__, "transform_rules": {}})
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages and whatever is in them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in PACKAGES:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin="imitated", is_package=True)
        spec.has_location = True  # what PaddleFormers takes for installed
        return spec

    def create_module(self, spec: Any) -> Any:
        return Imitated(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing is in it."""


def statements_of(request: dict[str, Any]) -> dict[str, Any]:
    module = importlib.import_module(f"paddleformers.transformers.{request['module']}")
    model_class = getattr(module, request["class"])
    config = model_class.config_class(**request["config"])
    found = {"from_hf": model_class._gen_aoa_config(config)["aoa_statements"]}
    back = getattr(model_class, "_gen_inv_aoa_config", None)
    if back is not None:
        found["to_hf"] = back(config)["aoa_statements"]
    return found


def ask(requests: dict[str, Any], imitated: bool) -> dict[str, Any]:
    """Ask every class that can be imported; the others' errors go in their place."""
    found: dict[str, Any] = {}
    for family, request in requests.items():
        try:
            found[family] = {"imitated": imitated, **statements_of(request)}
        except Exception as error:  # whatever a library's import does
            found[family] = {"imitated": imitated, "error": f"{type(error).__name__}: {error}"}
    return found


def main(arguments: Sequence[str] = ()) -> None:
    """Ask as it is; what fails then is asked by a process of its own, in which paddlefleet is imitated."""
    import subprocess

    requests = json.load(sys.stdin)
    if arguments:
        sys.meta_path.insert(0, Finder())
        answers = ask(requests, True)
    else:
        answers = ask(requests, False)
        failed = {family: requests[family] for family, answer in answers.items() if "error" in answer}
        if failed:
            command = [sys.executable, "-m", "tests.paddleformers.statements", "imitated"]
            said = subprocess.run(
                command, input=json.dumps(failed), capture_output=True, text=True, check=True, timeout=500
            )
            answers |= json.loads(said.stdout.splitlines()[-1])
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1:])
