"""Byte-level training text: the source files of the Python standard library, in a fixed order."""

from __future__ import annotations

import pathlib
import sysconfig

import numpy as np

MAX_BYTES = 4_000_000


def load_corpus(max_bytes: int = MAX_BYTES) -> np.ndarray:
    """Reads the top-level modules of the standard library, sorted by name.

    Args:
        max_bytes: The text is cut after this many bytes.

    Returns:
        The text as a 1-D array of byte values.

    Raises:
        FileNotFoundError: If this Python comes without the sources of its standard library.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if len(text) < 100_000:
        raise FileNotFoundError(f"found only {len(text)} bytes of Python source files in {folder} to train on")
    return np.frombuffer(bytes(text[:max_bytes]), dtype=np.uint8)


def make_batch(
    corpus: np.ndarray, step: int, batch_size: int, seq_len: int, part: int = 0, parts: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the batch of a step, which depends on the step number and on nothing else.

    Args:
        corpus: The text.
        step: Number of the training step.
        batch_size: Rows of the *global* batch, the same for every way to distribute the model.
        seq_len: Bytes per row.
        part: Which part of the rows to return (the data-parallel rank).
        parts: Into how many parts the rows are cut (the data-parallel degree).

    Returns:
        Tokens and targets (the tokens moved by one), both int64 ``[batch_size / parts, seq_len]``.
    """
    starts = np.random.default_rng([2024, step]).integers(0, len(corpus) - seq_len - 1, batch_size)
    starts = np.array_split(starts, parts)[part]
    rows = corpus[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return rows[:, :-1], rows[:, 1:]
