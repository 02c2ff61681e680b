"""A conversion's use of a model's configuration, and its notes about the rest.

Tested in tests/tools/test_conversion.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.planning.meshes import Mesh
from paddle_flexckpt.planning.strategy import Strategy
from paddle_flexckpt.transfer.files import CONFIG_FILE

# Files beside a model's weights that are needed to use it.
_BESIDE = re.compile(
    r".*tokeni[sz]er.*|vocab\..*|merges\.txt|spiece\.model|sentencepiece.*|special_tokens_map\.json|added_tokens\.json|"
    r"generation_config\.json|chat_template\..*|.*processor_config\.json"
)
_HEADS = ("num_key_value_heads", "num_attention_heads", "n_head")


def read_config(given: str | os.PathLike[str] | None, directory: SourceDirectory) -> bytes | None:
    """Return the text of a model's configuration; None if there is none.

    Args:
        given: The path of a file; None: that in the checkpoint's directory, if there is one.
        directory: The checkpoint's directory.

    Raises:
        ValidationError: It cannot be read, or is no JSON object.
    """
    try:
        if given is not None:
            with open(given, "rb") as file:
                text = file.read()
        elif CONFIG_FILE in directory.backend.names():
            text = directory.backend.read(CONFIG_FILE)
        else:
            return None
        if not isinstance(json.loads(text), dict):
            raise ValueError("it is not a JSON object")
        return text
    except (OSError, ValueError) as error:
        where = given or directory.backend.where(CONFIG_FILE)
        raise ValidationError(
            f"{where} cannot be read as a model's configuration: {error}. Remedy: correct it, or give another (config)"
        ) from error


def notes_of(
    config: bytes | None,
    dtype: str | None,
    dequantizes: bool,
    strategy: Strategy | Mesh | None,
    directory: SourceDirectory,
) -> list[str]:
    """Return notes on differences between a configuration and the tensors, and on files that are not copied."""
    known: dict[str, Any] = json.loads(config) if config is not None else {}
    notes = [*_of_dtype(known, dtype), *_of_heads(known, strategy), *_of_files(directory)]
    if dequantizes and known.get("quantization_config"):
        notes.append(
            f"{CONFIG_FILE} was copied as it is, and has a quantization_config; statements dequantize: take it out "
            "where all weights are dequantized"
        )
    return notes


def _of_dtype(known: dict[str, Any], dtype: str | None) -> Iterator[str]:
    named = [str(known[name]) for name in ("torch_dtype", "dtype") if name in known]
    if dtype is not None and any(name.rpartition(".")[2] != dtype for name in named):
        yield f"{CONFIG_FILE} was copied as it is, and says {named[0]}; the tensors are {dtype}"


def _of_heads(known: dict[str, Any], strategy: Strategy | Mesh | None) -> Iterator[str]:
    ranks = strategy.tp if isinstance(strategy, Strategy) else 1
    name = next((name for name in _HEADS if type(known.get(name)) is int), None)
    if name is not None and known[name] % ranks:
        yield (
            f"tp={ranks} cuts inside of heads: {CONFIG_FILE} has {name}={known[name]}, which that does not divide. A "
            "load puts any parts together again; the model's ranks have to hold the same parts, or repeat whole heads"
        )


def _of_files(directory: SourceDirectory) -> Iterator[str]:
    names = [name for name in sorted(directory.backend.names()) if _BESIDE.fullmatch(name)]
    if names:
        yield f"tensors and {CONFIG_FILE} are converted: copy {listed(names, 5)} from the source where they are needed"
