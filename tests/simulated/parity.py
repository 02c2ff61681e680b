"""Parity files past all processes: lost data files of a checkpoint, rebuilt from what the other nodes have.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from paddle_flexckpt.native.manifest import Manifest
    from paddle_flexckpt.native.parity import Block


def rebuild(manifest: Manifest, content: dict[str, bytes]) -> dict[str, bytes]:
    """Return the data files of a checkpoint, by the files that can be read: those among them, and what these give."""
    from paddle_flexckpt.native.parity import stripe_of
    from paddle_flexckpt.native.save_names import rank_of

    found = {name: data for name, data in content.items() if name not in manifest.parity_files}
    for name in sorted(manifest.parity_files & content.keys()):
        length = int.from_bytes(content[name][:8], "little")
        ranks = [rank_of(file) for file, _ in json.loads(content[name][8 : 8 + length])["files"]]
        stripe = stripe_of(manifest, ranks)
        for member, file in enumerate(stripe.files):
            if file not in found and stripe.sizes[member]:
                with contextlib.suppress(KeyError):  # another one is lost too
                    found[file] = b"".join(_combine(block, content) for block in stripe.data(member))
    return found


def _combine(block: Block, content: dict[str, bytes]) -> bytes:
    combined = np.zeros(block.length, dtype=np.uint8)
    for source in block.sources:
        part = np.frombuffer(content[source.file], dtype=np.uint8)[source.begin : source.begin + source.length]
        combined[: len(part)] ^= part
    return combined.tobytes()
