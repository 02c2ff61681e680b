"""Describe a model and the states of its optimizer, by names and shapes. Tested in tests/planning/test_layouts.py."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_flexckpt.optimizer_states import ADAM, MASTER, SCALARS

# Bytes of the alignment of each parameter on a device: `alignment` in
# paddle/distributed/fleet/utils/tensor_fusion_helper.py.
ALIGNMENT = 256
# Stage 3 cuts parameters of more elements (`segment_size` of group_sharded_parallel); its alignment on a CPU is 4,096.
SEGMENT_SIZE = 1 << 20


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of a model.

    Attributes:
        name: Its structured name.
        shape: Global shape, in elements.
        dtype: Name of the element type.
        tp_axis: The axis along which tensor parallelism cuts it; None: each rank has all of it.
        layers: The positions of its layers in the description of the model, by which a pipeline is cut; several where
            it is tied. Empty: every stage has it.
        is_trained: Whether the optimizer has it.
        expert: Number of its expert and of all experts of the layer, for a tensor that expert parallelism spreads.
        lacks: Suffixes of states that the optimizer does not have of it: Muon has one momentum of a matrix.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    tp_axis: int | None = None
    layers: tuple[int, ...] = ()
    is_trained: bool = True
    expert: tuple[int, int] | None = None
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """One state that an optimizer has of each parameter.

    Attributes:
        suffix: What follows the parameter's name and a dot.
        is_scalar: Whether it is one number, of the shape [1]; otherwise it has the parameter's shape.
        is_master: Whether it is the master weight, which only parameters in half precision have.
    """

    suffix: str
    is_scalar: bool = False
    is_master: bool = False


ADAMW = (*(State(f"{name}_0", is_scalar=name in SCALARS) for name in ADAM), State(MASTER, is_master=True))


@dataclass(frozen=True)
class Model:
    """A model and the states of its optimizer.

    Attributes:
        tensors: All tensors, in the order in which the optimizer was given them.
        layers: How many layers the description of the pipeline has.
        counted: The layers that stages share evenly; None: all (see :func:`~.strategy.stage_layers`).
        states: The optimizer's states of each trained parameter; empty: no optimizer.
        state_dtype: Element type of these states.
        segment_size: Stage 3 cuts parameters with more elements.
        alignment: Bytes to which stage 3 and sharding V2 pad each parameter.
    """

    tensors: tuple[ModelTensor, ...]
    layers: int = 1
    counted: frozenset[int] | None = None
    states: tuple[State, ...] = ADAMW
    state_dtype: str = "float32"
    segment_size: int = SEGMENT_SIZE
    alignment: int = ALIGNMENT
