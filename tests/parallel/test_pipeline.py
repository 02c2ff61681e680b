"""Pipelines: names that do not depend on stages and chunks, shared layers, mappings, and what is refused.

Every stage is built here in one process, by saying which rank it is: that needs no communication, and neither does
``sharded_state_dict``.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from paddle.distributed.fleet.meta_parallel.parallel_layers import pp_layers

from tests.remedies.following import provoked

pytestmark = [pytest.mark.compat, pytest.mark.paddle]

BLOCKS = 8
DEGREES = ((1, 1), (2, 1), (4, 1), (4, 2), (2, 2), (1, 2))


class Embedding(nn.Layer):
    def __init__(self, positions=False):
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        if positions:
            self.position = nn.Embedding(4, 3)

    @property
    def embedding_weight(self):
        return self.embedding.weight

    def forward(self, x):
        return self.embedding(x)


class Head(nn.Layer):
    """Another class for the last position of the shared weight; its name in here is another."""

    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([6, 3])
        self.bias = self.create_parameter([6], is_bias=True)

    @property
    def embedding_weight(self):
        return self.weight


class Block(nn.Layer):
    def __init__(self, width=2):
        super().__init__()
        self.fc = nn.Linear(3, width)
        self.inner = nn.Sequential(nn.LayerNorm(3), nn.ReLU())
        self.register_buffer("count", paddle.zeros([1]))

    def forward(self, x):
        return x


def head(layer, x):
    return paddle.matmul(x, layer.embedding_weight, transpose_y=True)


def relu(x):
    return nn.functional.relu(x)


def shared(layer=Embedding, forward_func=None, **kwargs):
    return SharedLayerDesc("emb", layer, forward_func, "embedding_weight", **kwargs)


def description(**kwargs):
    """An embedding, blocks with a function between them, and a head tied to the embedding: 11 entries."""
    blocks = [LayerDesc(Block) for _ in range(BLOCKS)]
    return [shared(**kwargs), *blocks[:3], relu, *blocks[3:], shared(forward_func=head, **kwargs)]


BLOCK_NAMES = ("fc.weight", "fc.bias", "inner.0.weight", "inner.0.bias", "count")
EXPECTED = {f"{i}.{name}" for i in (1, 2, 3, 5, 6, 7, 8, 9) for name in BLOCK_NAMES} | {"0.embedding.weight"}


@pytest.fixture
def stage(monkeypatch):
    """``stage(number, layers, stages, chunks)`` builds what one stage has."""
    monkeypatch.setattr(paddle.distributed.ParallelEnv, "device_id", 0, raising=False)
    monkeypatch.setattr(PipelineLayer, "_construct_shared_comm", lambda self: {})

    def build(number, layers, stages, chunks=1, kind=PipelineLayer, **kwargs):
        monkeypatch.setattr(paddle.distributed, "get_rank", lambda *_: number)
        if chunks > 1:
            kwargs["num_virtual_pipeline_stages"] = chunks
        topology = fleet.CommunicateTopology(["data", "pipe", "sharding", "model"], [1, stages, 1, 1])
        return kind(layers, topology=topology, **{"seg_method": "layer:Block", **kwargs})

    return build


def states(stage, layers, stages, chunks=1, **kwargs):
    return [stage(i, layers, stages, chunks, **kwargs).sharded_state_dict() for i in range(stages)]


@pytest.mark.parametrize(("stages", "chunks"), DEGREES)
def test_names_do_not_depend_on_stages_and_chunks(stage, stages, chunks):
    parts = states(stage, description(), stages, chunks)
    assert set().union(*parts) == EXPECTED
    # Each name is of one stage, but for the tied one, of which the first and the last stage have a copy.
    assert sum(map(len, parts)) == len(EXPECTED) + (stages > 1)
    for part in parts:
        assert [weight.key for weight in part.values()] == list(part)
    for part in (parts[0], parts[-1]):
        assert part["0.embedding.weight"].aliases == ("10.embedding.weight",)


def test_a_name_is_of_the_layer_at_its_index(stage):
    """Not only are the sets of names right: every block is told apart by its width."""
    layers = [LayerDesc(Block, i + 1) for i in range(BLOCKS)]
    for stages, chunks in DEGREES:
        for part in states(stage, layers, stages, chunks):
            for key, weight in part.items():
                if key.endswith("fc.bias"):
                    assert key == f"{weight.global_shape[0] - 1}.fc.bias"


def test_tensors_are_live_and_complete(stage):
    for number in range(4):
        pipeline = stage(number, description(), 4, 2)
        described = {id(weight.local_tensor) for weight in pipeline.sharded_state_dict().values()}
        assert {id(tensor) for tensor in (*pipeline.parameters(), *pipeline.buffers())} == described


def test_prefix(stage):
    pipeline = stage(1, description(), 2)
    plain, prefixed = pipeline.sharded_state_dict(), pipeline.sharded_state_dict("model.")
    assert list(prefixed) == [f"model.{key}" for key in plain]
    assert [weight.key for weight in prefixed.values()] == list(prefixed)
    assert prefixed["model.0.embedding.weight"].aliases == ("model.10.embedding.weight",)
    assert sorted(pipeline.sharded_state_dict(structured_name_prefix="model.")) == sorted(prefixed)


def test_segments_given_as_a_list(stage):
    layers = description()
    for bounds in ([0, 1, 11], [0, 5, 11], [0, 10]):
        assert set().union(*states(stage, layers, 2, seg_method=bounds)) == EXPECTED


def test_a_layers_rules_are_kept(stage):
    class Cut(nn.Linear):
        def _get_shard_rules(self):
            return {"weight": 1}

        def _get_shard_group(self):
            return SimpleNamespace(rank=1, nranks=2)

    pipeline = stage(1, [LayerDesc(Block), LayerDesc(Cut, 3, 2)], 2, seg_method="uniform")
    weight = pipeline.sharded_state_dict()["1.weight"]
    assert (weight.local_shape, weight.global_shape, weight.global_offset) == ((3, 2), (3, 4), (0, 2))


def test_layers_given_as_objects(stage):
    """Where the list has one layer twice, a stage that holds both has one tensor under both names."""
    block, other = Block(), Block()
    state = stage(0, [block, other, block], 1).sharded_state_dict()
    assert {key.split(".")[0] for key in state} == {"0", "1", "2"}
    assert state["0.fc.weight"].local_tensor is state["2.fc.weight"].local_tensor
    assert state["0.fc.weight"].aliases == ("2.fc.weight",)
    assert state["2.fc.weight"].aliases == ("0.fc.weight",)
    assert state["1.fc.weight"].aliases == ()


def test_names_tied_inside_a_layer(stage):
    class Twice(Block):
        def __init__(self):
            super().__init__()
            self.again = self.fc

    state = stage(1, [LayerDesc(Block), LayerDesc(Twice)], 2, seg_method="uniform").sharded_state_dict("m.")
    assert state["m.1.fc.weight"].aliases == ("m.1.again.weight",)
    assert state["m.1.again.weight"].aliases == ("m.1.fc.weight",)


def test_names_tied_inside_a_shared_layer(stage):
    class Twice(Embedding):
        def __init__(self):
            super().__init__()
            self.again = self.embedding

    (state,) = states(stage, [shared(Twice), LayerDesc(Block), shared(Twice)], 1)
    names = {f"{i}.{name}.weight" for i in (0, 2) for name in ("again", "embedding")}
    for key in ("0.again.weight", "0.embedding.weight"):
        assert set(state[key].aliases) == names - {key}


# -- shared layers -----------------------------------------------------------------------------------------------------


def test_a_shared_weight_at_three_positions(stage):
    blocks = [LayerDesc(Block) for _ in range(4)]
    layers = [shared(), blocks[0], shared(), *blocks[1:3], shared(forward_func=head), blocks[3]]
    for stages in (1, 2, 4):
        copies = [part["0.embedding.weight"] for part in states(stage, layers, stages) if "0.embedding.weight" in part]
        assert [copy.aliases for copy in copies] == [("2.embedding.weight", "5.embedding.weight")] * len(copies)
        assert not [key for part in states(stage, layers, stages) for key in part if key.startswith(("2.", "5."))]


def test_what_paddle_does_not_keep_equal_is_a_parameter_of_its_own(stage):
    """A position embedding beside the tied one: the last stage has one that no gradient reaches."""
    first, last = states(stage, description(positions=True), 2)
    assert set(first) | set(last) == EXPECTED | {"0.position.weight", "10.position.weight"}
    assert "10.position.weight" not in first and "0.position.weight" not in last
    assert last["10.position.weight"].aliases == ("0.position.weight",)
    # On one stage it is one, found under either name.
    (both,) = states(stage, description(positions=True), 1)
    assert set(both) == EXPECTED | {"0.position.weight"}
    assert both["0.position.weight"].aliases == ("10.position.weight",)


def test_the_nearest_position_before_comes_first(stage):
    copies = [shared(positions=True) for _ in range(3)]
    layers = [copies[0], LayerDesc(Block), copies[1], LayerDesc(Block), copies[2]]
    parts = states(stage, layers, 3, seg_method=[0, 2, 4, 5])
    assert parts[2]["4.position.weight"].aliases == ("2.position.weight", "0.position.weight")
    assert parts[1]["2.position.weight"].aliases == ("0.position.weight", "4.position.weight")
    assert parts[0]["0.position.weight"].aliases == ("2.position.weight", "4.position.weight")


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_shared_weight_in_layers_of_different_classes(stage, chunks):
    """PaddleNLP ties an embedding to a head so: the stages cannot know the name in the other class."""
    layers = [shared(), *(LayerDesc(Block) for _ in range(4)), shared(Head)]
    first, last = states(stage, layers, 2, chunks)
    assert first["0.embedding_weight"].aliases[:2] == ("0.embedding.weight", "5.embedding_weight")
    # A model of one process has it under this name, and the head's bias too.
    assert "5.weight" in last["0.embedding_weight"].aliases
    assert "0.weight" not in last and "5.weight" not in last and "5.bias" in last
    (both,) = states(stage, layers, 1, chunks)
    assert both["0.embedding_weight"].aliases == first["0.embedding_weight"].aliases


def test_optimizer_states_know_the_names_of_the_other_positions(stage):
    """From a model that keeps a tied tensor's state under the first of its names in the order of strings."""
    pipeline = stage(1, [LayerDesc(Block), LayerDesc(Block), shared(), *description()[1:]], 2)
    model = pipeline.sharded_state_dict()
    state = paddle.optimizer.AdamW(parameters=pipeline.parameters()).sharded_state_dict(model)
    assert state["2.embedding.weight.moment1_0"].aliases == ("12.embedding.weight.moment1_0",)
    assert state["2.embedding.weight.beta1_pow_acc_0"].aliases == ("12.embedding.weight.beta1_pow_acc_0",)
    assert len(state) == 4 * len(pipeline.parameters())


# -- other names -------------------------------------------------------------------------------------------------------


def names_of_the_whole_model():
    names = {key: f"model.layers.{key}" for key in EXPECTED}
    return {**names, "0.embedding.weight": "model.embed.weight", "10.embedding.weight": "lm_head.weight"}


class Named(PipelineLayer):
    def _get_pipeline_names(self):
        return names_of_the_whole_model()


@pytest.mark.parametrize(("stages", "chunks"), DEGREES)
def test_names_of_ones_own(stage, stages, chunks):
    parts = states(stage, description(), stages, chunks, kind=Named)
    names = names_of_the_whole_model()
    assert set().union(*parts) == {names[key] for key in EXPECTED}
    assert parts[-1]["model.embed.weight"].aliases == ("lm_head.weight",)


class Mapped(PipelineLayer):
    """As PaddleNLP's PipelinePretrainedModel: from the names of state_dict(), made when they are first needed."""

    _pp_to_single_mapping = None

    def _set_pipeline_name_mapping(self):
        self._pp_to_single_mapping = {}
        for name in PipelineLayer.state_dict(self):
            parts = name.split(".")
            if parts[0] == "shared_layers":
                single = ["embed", *parts[2:]]
            elif parts[0].isdigit() and self._num_virtual_pipeline_stages > 1:
                single = ["layers", str(int(parts[0]) + int(parts[1])) if parts[1].isdigit() else "0", *parts[2:]]
            else:
                single = ["layers", *parts]
            self._pp_to_single_mapping[name] = ".".join(single)


class MappedByMethod(Mapped):
    def _pp_to_single_mapping(self):
        Mapped._set_pipeline_name_mapping(self)
        return vars(self).pop("_pp_to_single_mapping")


class MappedByItself(Mapped):
    """As PaddleFormers' models, which take what the parent gives to be in the names of state_dict()."""

    def sharded_state_dict(self, *args, **kwargs):
        state = super().sharded_state_dict(*args, **kwargs)
        if self._pp_to_single_mapping is None:
            self._set_pipeline_name_mapping()
        for name in list(state):
            weight = state.pop(name)
            weight.key = self._pp_to_single_mapping[name]
            state[weight.key] = weight
        return state


@pytest.mark.parametrize("kind", [Mapped, MappedByMethod, MappedByItself])
@pytest.mark.parametrize(("stages", "chunks"), DEGREES)
def test_the_mapping_of_paddlenlp(stage, stages, chunks, kind):
    parts = states(stage, description(), stages, chunks, kind=kind)
    names = {f"layers.{key}" for key in EXPECTED - {"0.embedding.weight"}} | {"embed.embedding.weight"}
    assert set().union(*parts) == names
    for part in parts:
        assert [weight.key for weight in part.values()] == list(part)


# -- what a subclass adds ----------------------------------------------------------------------------------------------


class Extended(PipelineLayer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = self.create_parameter([1])
        self.extra = nn.Linear(2, 2)
        self.nothing = None
        if "emb" in self.shared_layers:
            self.embed = self.shared_layers["emb"]  # a second name of what is described already


@pytest.mark.parametrize("chunks", [1, 2])
def test_layers_and_parameters_of_a_subclass(stage, chunks):
    first, last = states(stage, description(), 2, chunks, kind=Extended)
    assert set(first) | set(last) == EXPECTED | {"scale", "extra.weight", "extra.bias"}
    assert {"scale", "extra.weight", "extra.bias"} <= set(first) & set(last)


class Grouped(nn.Layer):
    """Looks like the CUDAGraphedLayer that cannot be made without a GPU."""

    def __init__(self, layer):
        super().__init__()
        self.context = SimpleNamespace(layer=layer)
        self.add_sublayer("Graphed", layer)


@pytest.mark.parametrize("chunks", [1, 2])
def test_layers_in_cuda_graphs(stage, monkeypatch, chunks):
    monkeypatch.setattr(pp_layers, "CUDAGraphedLayer", Grouped)
    parts = states(stage, description(), 2, chunks, use_cudagraph=True)
    assert set().union(*parts) == EXPECTED


def test_dual_pipe(stage):
    """Each stage has one part from the front and one from the back; layers are shared inside a stage."""
    local = getattr(pp_layers, "LocalSharedLayerDesc", None)
    if local is None:
        pytest.skip("this Paddle has no DualPipeV (it came with 3.1)")

    class Tied(nn.Layer):
        def __init__(self, weight=None):
            super().__init__()
            self.weight = self.create_parameter([2, 2]) if weight is None else weight

    layers = [local("t", Tied), *(LayerDesc(Block) for _ in range(4)), local("t", Tied, forward_func=head)]
    first, second = states(stage, layers, 2, use_dualpipev=True)
    assert {key.split(".")[0] for key in first} == {"0", "1", "4", "5"}
    assert {key.split(".")[0] for key in second} == {"2", "3"}
    assert first["0.weight"].local_tensor is first["5.weight"].local_tensor
    assert first["5.weight"].aliases == ("0.weight",)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(pipeline):
    with pytest.raises(ValueError) as error:
        pipeline.sharded_state_dict()
    return str(error.value)


def test_a_name_that_the_mapping_lacks(stage):
    class Half(PipelineLayer):
        def _get_pipeline_names(self):
            return {"1.fc.weight": "w"}

    assert "no name for '0.embedding.weight' (embedding.weight of layer 0 (Embedding))" in refused(
        stage(0, description(), 1, kind=Half)
    )

    class Empty(PipelineLayer):
        _pp_to_single_mapping = {}

    assert "no name for shared_layers.emb.embedding.weight (embedding.weight of layer 0" in refused(
        stage(0, description(), 1, kind=Empty)
    )


@pytest.mark.parametrize("width", [2, 5])
def test_two_layers_under_one_name(stage, width):
    """Of equal shapes as well: one of the two would be lost."""

    class Same(PipelineLayer):
        def _get_pipeline_names(self):
            return {f"{i}.{name}": name for i in (0, 1) for name in ("weight", "bias")}

    layers = [LayerDesc(nn.Linear, 3, 2), LayerDesc(nn.Linear, 3, width)]
    pipeline = stage(0, layers, 1, kind=Same, seg_method="uniform")
    with provoked("parallel/pipeline.py", "give each a name of its own in _get_pipeline_names() or") as caught:
        pipeline.sharded_state_dict()
    assert (
        "key 'weight' would name two parameters: weight of layer 0 (Linear) of local shape [3, 2] and "
        f"weight of layer 1 (Linear) of local shape [3, {width}]"
    ) in str(caught.value)
    names = {f"{i}.{name}": f"{name} {i}" for i in (0, 1) for name in ("weight", "bias")}
    Same._get_pipeline_names = lambda self: names
    assert sorted(pipeline.sharded_state_dict()) == sorted(names.values())
    del Same._get_pipeline_names
    Same._pp_to_single_mapping = names
    assert sorted(pipeline.sharded_state_dict()) == sorted(names.values())


def test_a_run_function_that_is_not_as_described(stage):
    pipeline = stage(1, description(), 2)
    run = list(pipeline.run_function)
    pipeline.run_function = run[1:]
    assert "expected 5 functions in run_function; got 4" in refused(pipeline)
    pipeline.run_function = [Block(), *run[1:]]
    assert "is not in its run_function" in refused(pipeline)
    pipeline.run_function = [*run[:-1], relu]
    assert "layer 10 of PipelineLayer: expected the shared layer 'emb'" in refused(pipeline)
    with provoked("parallel/pipeline.py", "leave _layers_desc and run_function as PipelineLayer made them,"):
        pipeline.sharded_state_dict()
    pipeline.run_function = run
    expected = set(pipeline.sharded_state_dict())

    class Changed(PipelineLayer):
        def sharded_state_dict(self, structured_name_prefix=""):
            return {f"{structured_name_prefix}mine": self.part}

    changed = stage(1, description(), 2, kind=Changed)
    changed.run_function, changed.part = run[1:], object()
    assert changed.sharded_state_dict() == {"mine": changed.part} and expected > set()
    del pipeline._start_pos
    assert "does not say which layers" in refused(pipeline)


def test_chunks_that_are_not_as_described(stage):
    pipeline = stage(1, description(), 2, 2)
    pipeline._model_chunks[1].add_sublayer("late", nn.Linear(1, 1))
    assert "sub-layers ['late'] of a chunk of PipelineLayer are not in its run_function" in refused(pipeline)
    pipeline._model_chunks.pop()
    assert "1 chunks for 2 parts" in refused(pipeline)


def test_a_layer_that_ignores_the_prefix(stage):
    class Stubborn(Block):
        def sharded_state_dict(self, structured_name_prefix=""):
            return super().sharded_state_dict()

    text = refused(stage(1, [LayerDesc(Block), LayerDesc(Stubborn)], 2, seg_method="uniform"))
    assert "layer 1 (Stubborn) gives the name" in text and "begins with the prefix '1.'" in text


def test_two_thousand_parameters_cost_ten_times_two_hundred(stage):
    """Calls are counted, which no load of the machine changes; measured: 10.0 times."""
    few, many = (calls_of_a_description(stage, layers) for layers in (100, 1000))
    assert many < 11 * few


def calls_of_a_description(stage, layers):
    """How many functions ``sharded_state_dict`` of a pipeline of so many layers calls."""
    pipeline = stage(0, [LayerDesc(nn.LayerNorm, 2) for _ in range(layers)], 1, seg_method="uniform")
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        described = pipeline.sharded_state_dict()
    finally:
        sys.setprofile(None)
    assert len(described) == 2 * layers
    return calls
