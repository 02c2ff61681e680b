"""Files beside a model's tensors, such as its tokenizer's: which a conversion or an export copies, and which it leaves.

Tested in tests/tools/test_companion_files.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import xxhash

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.catalog.errors import listed, without_remedy
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.media.backend import Backend, publish
from paddle_flexckpt.transfer.files import CONFIG_FILE

# Names of files that a model is used with, whatever its tensors' format; a conversion reads config.json by itself.
COPIED = (
    "generation_config.json",
    "*tokeni[sz]er*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "sentencepiece*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*processor_config.json",
    "adapter_config.json",
)
_MOST_BYTES = 64 << 20
# Files that belong to the format of the source's tensors: the destination has its own.
_OF_FORMAT = re.compile(r"\..*|.*\.(index\.json|metadata|manifest|partition|distcp|safetensors)|flex-ckpt\..*")
_CODE = "as code, which whoever loads the model runs"


@dataclass(frozen=True)
class Companions:
    """The files beside a model's tensors.

    Attributes:
        copied: Names of the files to copy, and digests of their contents.
        left: Names of those to leave, and why.
    """

    copied: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def copy(self, source: Backend, sink: Backend) -> None:
        """Copy the files, each as a whole."""
        for name in self.copied:
            publish(sink, name, source.read(name))

    def notes(self) -> Iterator[str]:
        """Yield a line for each reason to leave files."""
        for reason in dict.fromkeys(self.left.values()):
            names = [name for name, why in self.left.items() if why == reason]
            yield f"left in the source, {reason}: {listed(names, 5)}"


def find_companions(
    backend: Backend, tensor_files: Collection[str], all_files: bool, more: Sequence[str] = ()
) -> Companions:
    """Return the files beside a model's tensors.

    Args:
        backend: The directory of the source.
        tensor_files: Names of its files of tensors.
        all_files: Whether files that stay are listed as left: not where the directory has other things too.
        more: Names of other files to copy.
    """
    found = Companions()
    for name in sorted(backend.names()):
        if name not in more and (name in tensor_files or name == CONFIG_FILE or _OF_FORMAT.fullmatch(name)):
            continue
        if name.endswith(".py"):
            reason = _CODE
        elif any(fnmatchcase(name, pattern) for pattern in (*more, *COPIED)):
            reason = _read(backend, name, found.copied)
        else:
            reason = "as tensors do not need them"
        if reason and all_files:
            found.left[name] = reason
    return found


def quantization_notes(settings: Mapping[str, Any], dequantizes: bool) -> list[str]:
    """Return a note if a copied configuration says that weights are quantized, and statements dequantize them."""
    if not dequantizes or not settings.get("quantization_config"):
        return []
    return [
        f"{CONFIG_FILE} was copied as it is, and has a quantization_config; statements dequantize: take it out where "
        "all weights are dequantized"
    ]


def _read(backend: Backend, name: str, copied: dict[str, str]) -> str:
    """Note a file's digest, or return why it is not copied."""
    try:
        with backend.open(name) as file:
            if file.size > _MOST_BYTES:
                return f"as larger than {format_bytes(_MOST_BYTES)}"
        copied[name] = xxhash.xxh3_128_hexdigest(backend.read(name))
    except (CheckpointError, OSError) as error:
        return f"as it cannot be read ({without_remedy(error)})"
    return ""
