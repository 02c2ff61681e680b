"""Files: the native format (data files, parts, manifest, commit) and the reading of byte ranges.

``docs/format.md`` is the specification; the modules here carry it out on a local or network file system.
"""

from paddle_flexckpt.storage.checksums import BLOCK_BYTES, Checksums, VerifyMode, verify_mode
from paddle_flexckpt.storage.data_file import DataFileWriter
from paddle_flexckpt.storage.directory import (
    CheckpointDirectory,
    SaveTicket,
    data_file_name,
)
from paddle_flexckpt.storage.manifest import FORMAT_VERSION, Manifest, merge_parts
from paddle_flexckpt.storage.paddle_checkpoint import read_paddle_metadata
from paddle_flexckpt.storage.reader import FileReader, ReadCount
from paddle_flexckpt.storage.safe_pickle import load_pickle

__all__ = [
    "BLOCK_BYTES",
    "FORMAT_VERSION",
    "CheckpointDirectory",
    "Checksums",
    "DataFileWriter",
    "FileReader",
    "Manifest",
    "ReadCount",
    "SaveTicket",
    "VerifyMode",
    "data_file_name",
    "load_pickle",
    "merge_parts",
    "read_paddle_metadata",
    "verify_mode",
]
