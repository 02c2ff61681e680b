"""Files: the native format (data files, parts, manifest, commit) and the reading of byte ranges.

``docs/format.md`` is the specification; the modules here carry it out on a local or network file system.
"""

from paddle_flexckpt.storage.backend import (
    Backend,
    FileLock,
    Location,
    SaveLock,
    open_backend,
    open_described,
    open_storage,
    reading,
)
from paddle_flexckpt.storage.blocks import ReadCount
from paddle_flexckpt.storage.checksums import BLOCK_BYTES, Checksums, VerifyMode, verify_mode
from paddle_flexckpt.storage.data_file import DataFileWriter
from paddle_flexckpt.storage.directory import CheckpointDirectory
from paddle_flexckpt.storage.formats import open_destination, shown
from paddle_flexckpt.storage.held_manifest import HeldManifest
from paddle_flexckpt.storage.listing import CheckpointInfo, detect_format, is_complete, latest, list_checkpoints
from paddle_flexckpt.storage.manifest import FORMAT_VERSION, ORIGINS, Manifest, Origin, merge_parts
from paddle_flexckpt.storage.node_directory import NodeDirectory
from paddle_flexckpt.storage.paddle_checkpoint import read_paddle_metadata
from paddle_flexckpt.storage.reader import FileReader
from paddle_flexckpt.storage.safe_pickle import load_pickle
from paddle_flexckpt.storage.ticket import SaveTicket, data_file_name
from paddle_flexckpt.storage.trainer_files import read_plain_file

__all__ = [
    "BLOCK_BYTES",
    "Backend",
    "CheckpointDirectory",
    "CheckpointInfo",
    "Checksums",
    "DataFileWriter",
    "FORMAT_VERSION",
    "FileLock",
    "FileReader",
    "HeldManifest",
    "Location",
    "Manifest",
    "NodeDirectory",
    "ORIGINS",
    "Origin",
    "ReadCount",
    "SaveLock",
    "SaveTicket",
    "VerifyMode",
    "data_file_name",
    "detect_format",
    "is_complete",
    "latest",
    "list_checkpoints",
    "load_pickle",
    "merge_parts",
    "open_backend",
    "open_described",
    "open_destination",
    "open_storage",
    "read_paddle_metadata",
    "read_plain_file",
    "reading",
    "shown",
    "verify_mode",
]
