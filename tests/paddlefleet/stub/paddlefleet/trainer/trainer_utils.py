"""What the imitated trainer finds in its output directory."""

from __future__ import annotations

import os
import re


def get_last_checkpoint(folder: str) -> str | None:
    """The directory with the highest step, complete or not."""
    names = [name for name in os.listdir(folder) if re.fullmatch(r"checkpoint-\d+", name)]
    return os.path.join(folder, max(names, key=lambda name: int(name[11:]))) if names else None
