"""Bytes to begin a search with: good files of every kind, and the words that they are made of."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from safetensors import numpy as safetensors_numpy

from paddle_flexckpt.foreign.paddle_files import StateFile, encode_metadata
from paddle_flexckpt.foreign.torch_saving import DcpChunk, DcpTensor, encode_dcp_metadata
from paddle_flexckpt.native.manifest import _digest
from tests.attacks.opcodes import DTYPE, array, named, short
from tests.foreign.writers import NEW, OLD, metadata_pickle
from tests.native.samples import items_of, store, whole
from tests.property.layouts import Shard
from tests.ramdisk import memory_directory

TORCH_DCP = Path(__file__).parents[1] / "foreign" / "data" / "torch_dcp"
DEEPSPEED = TORCH_DCP.parent / "deepspeed" / "stage1"
DEEPSPEED_OPTIMIZER = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
TORCH_SHARDS = TORCH_DCP.parent / "torch_safetensors"
TORCH_SHARD = "shard-00001-model-00001-of-00001.safetensors"
ROW = {"key": "w", "dtype": "float32", "shape": (4, 4), "offset": (0, 0), "local": (4, 4), "flat": (1, 7)}
BOX = {"key": "v", "dtype": "int64", "shape": (3,), "offset": (0,), "local": (3,)}


def container(header: dict, data: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def seal(data: bytes) -> bytes:
    """The bytes with the digest that a manifest of that content has, if they are a container at all."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        arrays = safetensors_numpy.load(data)
        info = {name: text for name, text in header["__metadata__"].items() if name != "digest"}
        header["__metadata__"] = {**info, "digest": _digest(arrays, info)}
    except Exception:  # whatever is wrong with it, it is for the reader to tell
        return data
    return container(header, data[8 + length :])


def headers() -> list[bytes]:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    return [
        container({}, b""),
        container({"w": entry}, bytes(16)),
        container({"v": {**entry, "data_offsets": [16, 32]}, "w": entry, "__metadata__": {"a": "b\\n"}}, bytes(32)),
        container({"e": {"dtype": "BF16", "shape": [0, 3], "data_offsets": [0, 0]}}, b""),
    ]


def _shards() -> list[Shard]:
    return [
        whole("w", "float32", (4, 4)),
        Shard("f", "bfloat16", (3, 5), (0, 0), (3, 5), (2, 9), 0),
        whole("s", "int64", ()),
        whole("none", "uint8", (0, 3)),
    ]


@cache
def _native() -> dict[str, bytes]:
    """A checkpoint of one file with a flattened shard, a scalar and an empty tensor, and its manifest."""
    with memory_directory() as path:
        shards = [shard for shard in _shards() if shard.key != "f"]
        shards.insert(1, Shard("f", "bfloat16", (3, 5), (0, 0), (3, 5), (0, 15), 0))
        stored = store(path, shards, step=7)
        return {"0.manifest": stored.manifest.encode(), "0_0.safetensors": stored.file().read_bytes()}


@cache
def manifests() -> list[bytes]:
    with memory_directory() as path:
        more = store(path, [*_shards(), *(whole("w", "float32", (4, 4), rank) for rank in (1, 2))], block_bytes=16)
        return [_native()["0.manifest"], more.manifest.encode()]


def data_files() -> list[bytes]:
    return [_native()["0_0.safetensors"]]


def pickles() -> list[bytes]:
    state = {"w": np.arange(6.0).reshape(2, 3), "s": np.int64(3), "names": {"w": "linear_0.w_0"}}
    return [
        *(pickle.dumps(state, protocol) for protocol in (2, 3, 4, 5)),
        pickle.dumps([1, -1, 1 << 70, 1.5, "text", (), (1, 2, 3, 4), [True, None], {"a": (1,), 2: []}], 4),
        *metadata(),
    ]


def metadata() -> list[bytes]:
    return [
        metadata_pickle({"0_0.distcp": [ROW, BOX]}),
        metadata_pickle({"0_0.distcp": [ROW]}, protocol=2),
        metadata_pickle({"0_0.distcp": [{**ROW, "flat": None}]}, OLD, ("global_shape", "flattened_range")),
        metadata_pickle({"0_0.safetensors": [{**ROW, "flat": None}]}),
        _converted()["0.metadata"],
    ]  # fmt: skip


@cache
def _converted() -> dict[str, bytes]:
    """What a conversion to Paddle's format writes."""
    items = items_of(_shards(), "0_0.distcp")
    data = b"".join(map(bytes, StateFile(items).pieces(np.zeros(n, np.uint8) for n in items.byte_length if n)))
    return {"0_0.distcp": data, "0.metadata": encode_metadata(items, flat_mapping=True)}


def distcp() -> list[bytes]:
    arrays = {"w": np.arange(6, dtype=np.float32), "v": np.arange(3)}
    return [pickle.dumps(arrays, protocol) for protocol in (3, 4, 5)] + [
        pickle.dumps({**arrays, "StructuredToParameterName@@": {"w": "linear_0.w_0"}}, 4),
        _converted()["0_0.distcp"],
    ]


def paddle_pickles() -> list[bytes]:
    nested = {"master_weights": {"linear_0.w_0": np.zeros(2)}, "LR_Scheduler": {"last_epoch": 3}, "l": [1]}
    columns = np.asfortranarray(np.zeros((2, 3)))
    return [*distcp()[1:], *(pickle.dumps({**nested, "c": columns}, protocol) for protocol in (2, 4))]


def _torch_dcp() -> dict[str, bytes]:
    """What torch.distributed.checkpoint has written."""
    return {file.name: file.read_bytes() for file in sorted(TORCH_DCP.iterdir())}


def torch_metadata() -> list[bytes]:
    return [_torch_dcp()[".metadata"], _metadata_with_runs()]


def _metadata_with_runs() -> bytes:
    """Tensors of so many chunks that their records are read in runs."""
    chunks = [DcpChunk((4 * row, 0), (4, 300), f"__{row % 2}_0.distcp", 1577 * row, 1577) for row in range(12)]
    return encode_dcp_metadata([DcpTensor(key, "float32", (48, 300), chunks) for key in "ab"])


def torch_items() -> list[bytes]:
    return [_torch_dcp()["__0_0.distcp"]]


def _deepspeed() -> dict[str, bytes]:
    """What two ranks of DeepSpeed have written with ZeRO 1."""
    return {file.name: file.read_bytes() for file in sorted(DEEPSPEED.iterdir())}


def deepspeed_optimizers() -> list[bytes]:
    return [_deepspeed()[DEEPSPEED_OPTIMIZER]]


def deepspeed_models() -> list[bytes]:
    return [_deepspeed()["mp_rank_00_model_states.pt"]]


def _torch_shards() -> dict[str, bytes]:
    """What torch's HuggingFaceStorageWriter has written."""
    return {file.name: file.read_bytes() for file in sorted(TORCH_SHARDS.iterdir())}


def torch_shards() -> list[bytes]:
    return [_torch_shards()[TORCH_SHARD]]


def archives() -> list[bytes]:
    made = []
    for arrays in ({"w": np.arange(6.0).reshape(2, 3)}, {"c": np.asfortranarray(np.zeros((2, 3))), "s": np.int64(3)}):
        for save in (np.savez, np.savez_compressed):
            target = io.BytesIO()
            save(target, **arrays)
            made.append(target.getvalue())
    return made


def foreign() -> list[bytes]:
    entry = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    return [container({"w": entry, "__metadata__": {"format": "np"}}, bytes(range(64))), *headers()]


def indices() -> list[bytes]:
    weight_map = {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}
    return [
        json.dumps({"metadata": {"total_size": 80.5}, "weight_map": weight_map}).encode(),
        json.dumps({"weight_map": {}, "master_weights": True, "type": "lora"}, indent=2).encode(),
        json.dumps({"quant_ckpt_resume_times": 0}).encode(),
    ]


def _weights(**tensors: list[int]) -> bytes:
    header: dict = {"__metadata__": {"format": "np"}}
    position = 0
    for name, shape in tensors.items():
        end = position + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, end]}
        position = end
    return container(header, bytes(position))


def weights() -> list[bytes]:
    return [_weights(w=[4, 4]), *headers()]


def states_of_a_rank() -> list[bytes]:
    return [_weights(**{"w/moment1_0": [2, 4], "w/beta1_pow_acc_0": [1], "v/moment1_0": [4]}), *headers()]


def _indexed() -> dict[str, bytes]:
    return {"model-00001-of-00002.safetensors": _weights(w=[4, 4]), "model-00002-of-00002.safetensors": _weights(v=[4])}


def _unified() -> dict[str, bytes]:
    """A unified checkpoint, but for the states of one of two ranks."""
    return {
        **_indexed(),
        "model.safetensors.index.json": indices()[0],
        "optimizer.safetensors.index.json": indices()[2],
        "optimizer.tp00.safetensors": states_of_a_rank()[0],
    }


# The directories of the targets that read one file among others.
FILES: dict[str, Callable[[], dict[str, bytes]]] = {
    "data": _native,
    "metadata": lambda: {"0_0.distcp": distcp()[1], "0_0.safetensors": foreign()[0]},
    "distcp": lambda: {"0.metadata": metadata()[0]},
    "foreign": lambda: {"0.metadata": metadata()[3]},
    "index": _indexed,
    "weights": dict,
    "paddle_pickle": dict,
    "npz": dict,
    "torch_metadata": _torch_dcp,
    "torch_items": _torch_dcp,
    "deepspeed": _deepspeed,
    "deepspeed_model": _deepspeed,
    "torch_shards": _torch_shards,
    "unified": _unified,
}

INDEX_WORDS = (
    b'"metadata"', b'"weight_map":{', b'"w":', b'"v":', b'"model-00001-of-00002.safetensors"', b'"ckpt_quant_stage":',
    b'"../model-00001-of-00002.safetensors"', b'"/etc/passwd"', b'"model.safetensors.index.json"', b'"."', b'""',
    b'"O1"', b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b"\\ud800", b"\\u0000", b"null", b"true", b"-1", b"1e9",
    b"1e999", b"NaN", b"9223372036854775808", b" ", b"\t", b"\xff",
)  # fmt: skip
HEADER_WORDS = (
    b'"__metadata__":{}', b'"w":', b'{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}', b'"dtype"', b'"shape"',
    b'"data_offsets"', b'"BF16"', b'"F8_E4M3"', b'"BOOL"', b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b"\\ud800",
    b"null", b"true", b"-1", b"1e9", b"0.5", b"NaN", b"9223372036854775808", b"1152921504606846975", b" ", b"\t",
    b"\xf0\x9f\x92\xbe", b"\xff",
)  # fmt: skip
MANIFEST_WORDS = (
    *HEADER_WORDS, b'"catalog.keys"', b'"catalog.flat_start"', b'"checksums"', b'"file_bytes"', b'"block_bytes":"0"',
    b'"block_bytes":"-1"', b'"world_size":"', b'"I8"', b'"U8"', b'"I64"', b'"F64"', b"\x7f" * 8, b"\xff" * 8, b"\x80",
    (1 << 40).to_bytes(8, "little"), (1 << 62).to_bytes(8, "little"), b'["w"]', b'["../a"]', b'["complex128"]',
)  # fmt: skip
DATA_FILE_WORDS = (
    *HEADER_WORDS, b'"shards":"', b'\\"flattened_range\\": ', b'\\"global_shape\\": [', b"null", b'"unique_id":"1"',
    b'"world_size":"', b'"step":"', b'"format_version":"2"', b"[1, 1]",
)  # fmt: skip
ARCHIVE_WORDS = (
    b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"\xff" * 2, b"\xff" * 4, b"\1\0\x10\0", bytes(8),
    b"w.npy", b"../w.npy", b"\x93NUMPY\1\0", b"\x93NUMPY\2\0", b"'descr'", b"'<f4'", b"'|O'", b"'<V2'", b"True",
    b"[('a', '<f4')]", b"False", b"(2,)", b"()", b"(2, 3)", b"'shape'", b"-1", b"999999999999999999", b"(", b")",
    b",", b"}", b" ", b"\n", b"\x08\0",
)  # fmt: skip
_DCP = "torch.distributed.checkpoint.metadata"
TORCH_WORDS = (
    *(bytes([code]) for code in b"(N])}.tbaesuRQ\x81\x85\x86\x87\x88\x89\x93\x94KJMGhjqr"),
    *(named(_DCP, name) + b")\x81" for name in ("Metadata", "ChunkStorageMetadata", "BytesStorageMetadata")),
    named(_DCP, "MetadataIndex") + b")\x81", named("torch", "Size"), named("torch", "float32"), named("os", "system"),
    named("torch", "float8_e8m0fnu"), named("pathlib", "PosixPath"), short("__0_0.distcp"), short("../__0_0.distcp"),
    short("transform_descriptors"), short("mcore_data"), short("offset"), short("length"), short("chunks"),
    b"ctorch._utils\n_rebuild_tensor_v3\n", b"ctorch\nHalfStorage\n", b"ctorch.storage\nUntypedStorage\n",
    b"K\xff", b"J\xff\xff\xff\xff", b"\x8a\x10" + b"\x7f" * 16, b"PK\1\2", b"PK\3\4", b"PK\5\6", b"\xff" * 4,
    b"big   ", b"\x08\0",
)  # fmt: skip
SHARD_WORDS = (
    b'\\"saved_offsets\\": [', b'"DCP_SHARDING_INFO":"', b'\\"model.rows\\": {', b"[0, 3]", b"[3, 0]", b"[]", b"-1",
    b"{}", b'"F32"', b'"shape":[', b'"data_offsets":[', b"1152921504606846975", b"null", b"\\u0000", b"]", b"}", b",",
)  # fmt: skip
DEEPSPEED_WORDS = (
    *(bytes([code]) for code in b"(N])}.tbaesuRQ\x81\x85\x86\x87\x88\x89KJMGhjqrcX"), b"K\xff", b"J\xff\xff\xff\xff",
    b"ccollections\nOrderedDict\n)R", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nTensor\n", b"cos\nsystem\n",
    b"ctorch._tensor\n_rebuild_from_type_v2\n", b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n", b"PK\1\2",
    b"cdeepspeed.utils.tensor_fragment\nfragment_address\n)\x81", b"PK\3\4", b"PK\5\6", b"\xff" * 4, b"\x08\0",
    b"X\x0f\0\0\0partition_count", b"X\5\0\0\0start", b"X\5\0\0\0numel", b"X\6\0\0\0module", b"X\1\0\0\0",
)  # fmt: skip
PICKLE_WORDS = (
    *(bytes([code]) for code in b"(N])}.tbaesuR\x81\x85\x86\x87\x88\x89\x93\x94KJMGhjqr"),
    named(NEW, "Metadata") + b")\x81", named(NEW, "LocalTensorMetadata") + b")\x81",
    named(OLD, "LocalTensorIndex") + b")\x81", named("numpy._core.multiarray", "scalar"),
    named("numpy._core.numeric", "_frombuffer"), named("_codecs", "encode"), named("os", "system"), DTYPE,
    array(b"K\x01\x85"), short("w"), short("global_offset"), short("flattened_range"), short("0_0.distcp"),
    named("builtins", "tuple"), short("StructuredToParameterName@@"), short("UnpackBigParamInfor@@"),
    b"C\x04\0\0\0\0", b"]\x94", b"}\x94", b"h\x00", b"K\xff", b"J\xff\xff\xff\xff", b"\x8a\x10" + b"\x7f" * 16,
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x95\0\0\0\0\0\0\0\0", b"X\xff\xff\xff\x7f", b"B\xff\xff\xff\xff",
)  # fmt: skip
