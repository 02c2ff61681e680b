"""The parser of the imitated trainer: what is asked of it is that it makes dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any


class PdArgumentParser(argparse.ArgumentParser):
    def __init__(self, types: Any) -> None:
        super().__init__()
        self.types = types
        for cls in types:
            for each in dataclasses.fields(cls):
                self.add_argument(f"--{each.name}", default=each.default, help=each.metadata.get("help"))

    def parse_args_into_dataclasses(self, args: list[str]) -> tuple[Any, ...]:
        given = vars(self.parse_args(args))
        return tuple(cls(**{each.name: given[each.name] for each in dataclasses.fields(cls)}) for cls in self.types)
