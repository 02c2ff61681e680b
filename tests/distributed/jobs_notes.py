"""Code that users wrote for Paddle's FlexCheckpoint while it was made, word for word, with the names from here."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt import (
    LocalTensorIndex,
    LocalTensorMetadata,
    Metadata,
    _load_state_dict,
    make_replicated_sharded_tensor,
    make_tp_sharded_tensor_for_checkpoint,
)
from tests.distributed import jobs_common as common


def build_sharded_state_dict(state_dict, shard_rules=None, prefix=""):
    shard_rules = shard_rules or {}
    sharded_state_dict = {}
    for key, tensor in state_dict.items():
        full_key = f"{prefix}{key}" if prefix else key
        if key in shard_rules:
            sharded_state_dict[full_key] = make_tp_sharded_tensor_for_checkpoint(
                key=full_key, tensor=tensor, tensor_parallel_axis=shard_rules[key]
            )
        else:
            sharded_state_dict[full_key] = make_replicated_sharded_tensor(key=full_key, tensor=tensor)
    return sharded_state_dict


def reshard_sharded_state_dict(src_sharded_state_dict, dst_sharded_state_dict, process_group, coordinator_rank=0):
    local_src_state_dict_shard_info = {
        key: (
            value.global_offset,
            value.local_shape,
            str(value.local_tensor.dtype).split(".")[-1],
            value.global_shape,
            value.is_flattened,
        )
        for key, value in src_sharded_state_dict.items()
    }
    global_src_state_dict_shard_info = []
    dist.all_gather_object(global_src_state_dict_shard_info, local_src_state_dict_shard_info, group=process_group)
    src_state_dict_shard_info = {}
    for rank_shard_info in global_src_state_dict_shard_info:
        for key, tensor_shard_info in rank_shard_info.items():
            if key not in src_state_dict_shard_info:
                src_state_dict_shard_info[key] = []
            src_state_dict_shard_info[key].append(tensor_shard_info)
    state_dict_metadata = {
        tensor_name: [
            LocalTensorMetadata(global_offset=shard_info[0], local_shape=shard_info[1], dtype=shard_info[2])
            for shard_info in shard_infos
        ]
        for tensor_name, shard_infos in src_state_dict_shard_info.items()
    }
    virtual_file_path = f"vfile_{dist.get_rank()}"
    local_storage_metadata = {
        LocalTensorIndex(tensor_key=value.key, global_offset=value.global_offset): virtual_file_path
        for key, value in src_sharded_state_dict.items()
    }
    global_storage_metadata = []
    dist.all_gather_object(global_storage_metadata, local_storage_metadata, group=process_group)
    storage_metadata = {}
    for rank_storage_metadata in global_storage_metadata:
        storage_metadata.update(rank_storage_metadata)
    metadata = Metadata(state_dict_metadata=state_dict_metadata, storage_metadata=storage_metadata, flat_mapping=None)
    src_state_dict = {key: value.local_tensor for key, value in src_sharded_state_dict.items()}
    _load_state_dict(
        target_state_dict=dst_sharded_state_dict,
        source_state_dict={virtual_file_path: src_state_dict},
        metadata_list=[metadata],
        coordinator_rank=coordinator_rank,
        process_group=process_group,
        offload=False,
    )


def older_code():
    """Rows of a tensor-parallel layer, described by the older names, become columns through the older call."""
    common.init_tensor_parallel(2)
    rank = dist.get_rank()
    whole = np.arange(48, dtype="float32").reshape(8, 6)
    bias = np.arange(6, dtype="float32")
    tensors = {"weight": paddle.to_tensor(whole[4 * rank :][:4]), "bias": paddle.to_tensor(bias)}
    source = build_sharded_state_dict(tensors, {"weight": 0}, "linear.")
    described = [[list(w.global_shape), list(w.global_offset)] for w in source.values()]
    target = {
        "linear.weight": fc.ShardedTensor("linear.weight", paddle.zeros([8, 3]), (8, 3), (8, 6), (0, 3 * rank)),
        "linear.bias": make_replicated_sharded_tensor("linear.bias", paddle.zeros([6])),
    }
    reshard_sharded_state_dict(source, target, None)
    return {
        "described": described,
        "right": common.same_bytes(target["linear.weight"].local_tensor, whole[:, 3 * rank :][:, :3])
        and common.same_bytes(target["linear.bias"].local_tensor, bias),
    }
