"""AOA statements from trees of layers: rules of classes, hooks, names, folding, and what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_layers
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from paddle.distributed.fleet.utils import sequence_parallel_utils as sequence_parallel

import paddle_flexckpt as fc
from paddle_flexckpt import gen_aoa_statements
from paddle_flexckpt.aoa.model_rules import model_rules
from paddle_flexckpt.aoa.parser import parse
from paddle_flexckpt.communication import group_communicators as communicator
from paddle_flexckpt.parallel.experts import ExpertParallelMixin
from paddle_flexckpt.parallel.layers import ColumnParallelMixin, RowParallelMixin, VocabParallelMixin
from tests.parallel.test_sharding import Wrapper as SlicingWrapper

HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, VOCABULARY, LAYERS, EXPERTS = 6, 4, 2, 2, 5, 7, 3, 4


class RMSNorm(nn.Layer):
    def __init__(self, width=HIDDEN):
        super().__init__()
        self.weight = self.create_parameter([width], default_initializer=nn.initializer.Normal())


def linear(inputs, outputs, bias=False):
    return nn.Linear(inputs, outputs, bias_attr=None if bias else False)


class Attention(nn.Layer):
    def __init__(self):
        super().__init__()
        self.q_proj = linear(HIDDEN, HEADS * WIDTH)
        self.k_proj = linear(HIDDEN, KV_HEADS * WIDTH)
        self.v_proj = linear(HIDDEN, KV_HEADS * WIDTH)
        self.o_proj = linear(HEADS * WIDTH, HIDDEN)


class FusedAttention(nn.Layer):
    """Speaks for a layer inside it."""

    def __init__(self):
        super().__init__()
        self.qkv_proj = linear(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH)
        self.o_proj = linear(HEADS * WIDTH, HIDDEN)

    def _get_aoa_rules(self, direction):
        q, k, v = (f"{{hf_parent}}.{x}_proj.weight" for x in "qkv")
        fused = f"fused_qkv, num_heads={HEADS}, num_key_value_groups={KV_HEADS}"
        if direction == "from_hf":
            return {"qkv_proj.weight": f"{q}^T, {k}^T, {v}^T -> {{paddle}}, {fused}"}
        back = [f"{{paddle}} -> {q}, {k}, {v}, {fused}", *(f"{x}^T -> {x}" for x in (q, k, v))]
        return {"qkv_proj.weight": "\n".join(back)}


class MLP(nn.Layer):
    def __init__(self):
        super().__init__()
        self.gate_proj = linear(HIDDEN, INNER)
        self.up_proj = linear(HIDDEN, INNER)
        self.down_proj = linear(INNER, HIDDEN)


class Router(nn.Layer):
    """A user's layer with a method."""

    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([EXPERTS, HIDDEN])
        self.register_buffer("e_score_correction_bias", paddle.randn([EXPERTS]))

    def _get_aoa_rules(self, direction):
        return {"weight": "copy"}


class MoE(nn.Layer):
    def __init__(self):
        super().__init__()
        self.gate = Router()
        self.experts = nn.LayerList([MLP() for _ in range(EXPERTS)])


class Block(nn.Layer):
    def __init__(self, mlp=MLP, attention=Attention):
        super().__init__()
        self.self_attn = attention()
        self.mlp = mlp()
        self.input_layernorm = RMSNorm()
        self.post_attention_layernorm = RMSNorm()


class Model(nn.Layer):
    def __init__(self, blocks):
        super().__init__()
        self.model = nn.Layer()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.model.layers = nn.LayerList(blocks)
        self.model.norm = RMSNorm()
        self.lm_head = linear(HIDDEN, VOCABULARY)


def llama(attention=Attention):
    return Model([Block(attention=attention) for _ in range(LAYERS)])


def mixture():
    return Model([Block(), Block(MoE), Block(MoE)])


def own(**parameters):
    """A layer with parameters of its own, of these shapes."""
    layer = nn.Layer()
    for name, shape in parameters.items():
        setattr(layer, name, layer.create_parameter(shape))
    return layer


def required(config):
    return {text for text in config["aoa_statements"] if not text.endswith("optional")}


# -- statements --------------------------------------------------------------------------------------------------------


def test_a_llama_has_the_statements_of_the_rules_for_llama():
    assert set(gen_aoa_statements(llama())) == required(model_rules("llama"))
    assert set(gen_aoa_statements(llama(FusedAttention))) == required(
        model_rules("llama", num_heads=HEADS, num_key_value_groups=KV_HEADS)
    ) - {f"model.layers.$LAYER_ID.self_attn.{x}_proj.weight^T -> model.layers.$LAYER_ID.self_attn.{x}_proj.weight"
         for x in "qkv"} | {text for text in model_rules("llama", "fused", num_heads=HEADS,
         num_key_value_groups=KV_HEADS)["aoa_statements"] if "self_attn.qkv_proj.weight" in text}  # fmt: skip


def test_the_way_back_reads_the_model():
    assert gen_aoa_statements(llama(), "to_hf", hf_names=lambda name: f"hf.{name}")[-2:] == [
        "model.norm.weight -> hf.model.norm.weight",
        "lm_head.weight^T -> hf.lm_head.weight",
    ]


def test_a_mixture_of_experts():
    statements = gen_aoa_statements(mixture())
    layer = "model.layers.$LAYER_ID"
    for name in ("gate_proj", "up_proj", "down_proj"):
        expert = f"{layer}.mlp.experts.$EXPERT_ID.{name}.weight"
        assert f"{expert}^T -> {expert}" in statements
        dense = f"model.layers.0.mlp.{name}.weight"  # only one layer has it
        assert f"{dense}^T -> {dense}" in statements
    assert f"{layer}.mlp.gate.weight -> {layer}.mlp.gate.weight" in statements
    bias = f"{layer}.mlp.gate.e_score_correction_bias"
    assert f"{bias} -> {bias}" in statements
    # Embedding, norm and head; norms, attention and router of every layer; experts; a dense layer.
    assert len(statements) == 3 + (2 + 4 + 2) + 3 + 3


@pytest.mark.parametrize("make", [llama, mixture, lambda: llama(FusedAttention)])
def test_there_and_back(make, tmp_path):
    """Through statements, HF's arrays are the model's, and come back bit for bit."""
    model = make()
    rng = np.random.default_rng(0)
    hf = {}
    for name, tensor in model.state_dict().items():
        names = [name.replace("qkv", x) for x in "qkv"] if "qkv" in name else [name]
        for one in names:
            outputs = {"q_proj": HEADS * WIDTH, "k_proj": KV_HEADS * WIDTH, "v_proj": KV_HEADS * WIDTH}
            shape = list(tensor.shape)
            if tensor.ndim == 2 and not re.search("embed|gate.weight", name):
                shape = [outputs.get(one.split(".")[-2], shape[1]) if "self_attn" in one and "o_proj" not in one
                         else shape[1], shape[0]]  # fmt: skip
            hf[one] = rng.normal(size=shape).astype("float32")
    fc.save_state_dict(hf, tmp_path / "hf")
    config = {"aoa_statements": gen_aoa_statements(model)}
    fc.load_state_dict(model.sharded_state_dict(), tmp_path / "hf", aoa_config=config, strict=True)
    block = model.model.layers[1]
    assert (block.self_attn.o_proj.weight.numpy() == hf["model.layers.1.self_attn.o_proj.weight"].T).all()
    assert (block.input_layernorm.weight.numpy() == hf["model.layers.1.input_layernorm.weight"]).all()
    assert (model.model.embed_tokens.weight.numpy() == hf["model.embed_tokens.weight"]).all()
    if isinstance(block.mlp, MoE):
        for expert in range(EXPERTS):
            name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
            assert (block.mlp.experts[expert].up_proj.weight.numpy() == hf[name].T).all()
        assert (block.mlp.gate.weight.numpy() == hf["model.layers.1.mlp.gate.weight"]).all()
    fc.save_state_dict(model.sharded_state_dict(), tmp_path / "paddle")
    config = {"aoa_statements": gen_aoa_statements(model, "to_hf")}
    back = {name: np.zeros_like(value) for name, value in hf.items()}
    fc.load_state_dict(back, tmp_path / "paddle", aoa_config=config, strict=True)
    for name, value in hf.items():
        assert back[name].tobytes() == value.tobytes(), name


# -- Paddle's layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls",
    [
        mp_layers.ColumnParallelLinear,
        mp_layers.RowParallelLinear,
        sequence_parallel.ColumnSequenceParallelLinear,
        sequence_parallel.RowSequenceParallelLinear,
    ],
)
def test_parallel_linear_layers_are_transposed(cls):
    class Part(cls):
        """As on the second of two ranks, without a process group."""

        def __init__(self):
            nn.Layer.__init__(self)
            self.model_parallel_group = SimpleNamespace(rank=1, nranks=2)
            self.weight, self.bias = self.create_parameter([4, 2]), self.create_parameter([2])

    layer = nn.Sequential(("fc", Part()))
    assert gen_aoa_statements(layer) == ["fc.weight^T -> fc.weight", "fc.bias -> fc.bias"]
    assert gen_aoa_statements(layer, "to_hf") == ["fc.weight^T -> fc.weight", "fc.bias -> fc.bias"]


def test_embeddings_convolutions_and_norms_are_as_they_are():
    class Vocabulary(mp_layers.VocabParallelEmbedding):
        def __init__(self):
            nn.Layer.__init__(self)
            self.model_parallel_group = SimpleNamespace(rank=0, nranks=2)
            self.weight = self.create_parameter([4, 2])

    layers = dict(a=Vocabulary(), b=nn.Embedding(3, 2), c=nn.Conv2D(3, 4, 2), d=nn.LayerNorm(3), e=nn.BatchNorm1D(2))
    statements = gen_aoa_statements(nn.Sequential(*layers.items()))
    assert statements == [
        f"{name} -> {name}"
        for name in "a.weight b.weight c.weight c.bias d.weight d.bias e.weight e.bias e._mean e._variance".split()
    ]


def test_a_subclass_has_the_rule_of_its_class():
    class MyLinear(nn.Linear):
        pass

    assert gen_aoa_statements(nn.Sequential(("fc", MyLinear(2, 3, bias_attr=False)))) == ["fc.weight^T -> fc.weight"]


def test_a_users_layers_that_take_our_mixins_have_their_rules():
    def kind(mixin):
        class Own(mixin, nn.Layer):
            def __init__(self):
                super().__init__()
                self.model_parallel_group = SimpleNamespace(rank=0, nranks=2)
                self.weight, self.bias = self.create_parameter([2, 2]), None

        return Own()

    mixins = dict(column=ColumnParallelMixin, row=RowParallelMixin, vocabulary=VocabParallelMixin)
    assert gen_aoa_statements(nn.Sequential(*((name, kind(mixin)) for name, mixin in mixins.items()))) == [
        "column.weight^T -> column.weight",
        "row.weight^T -> row.weight",
        "vocabulary.weight -> vocabulary.weight",
    ]


# -- rules of users ----------------------------------------------------------------------------------------------------


def test_a_class_without_a_rule_is_an_error():
    class Table(nn.Layer):
        def __init__(self):
            super().__init__()
            self.scale = self.create_parameter([3])
            self.kernel = self.create_parameter([2, 3])

    model = nn.Sequential(("table", Table()))
    with pytest.raises(
        ValueError,
        match=r"'table.kernel' \[2, 3\] is 'kernel' of a Table, .*Remedy .FC606.: .*_get_aoa_rules\(self, direction\)",
    ):
        gen_aoa_statements(model)
    rules = {Table: {"kernel": "transpose"}}
    assert gen_aoa_statements(model, rules=rules) == [
        "table.scale -> table.scale",
        "table.kernel^T -> table.kernel",
    ]


def test_rules_for_a_class_come_before_its_method_and_both_before_paddles():
    class Flipped(nn.Linear):
        def _get_aoa_rules(self, direction):
            return {"weight": "copy"}

    model = nn.Sequential(("fc", Flipped(2, 3, bias_attr=False)))
    assert gen_aoa_statements(model) == ["fc.weight -> fc.weight"]
    assert gen_aoa_statements(model, rules={nn.Linear: {"weight": "absent"}}) == ["_ -> fc.weight"]
    assert gen_aoa_statements(model, "to_hf", rules={nn.Linear: {"weight": "absent"}}) == ["fc.weight -> _"]

    def rule(layer, direction):
        return {"weight": "transpose" if direction == "from_hf" and layer.weight.shape == [2, 3] else "copy"}

    assert gen_aoa_statements(model, rules={Flipped: rule}) == ["fc.weight^T -> fc.weight"]
    assert gen_aoa_statements(model, "to_hf", rules={Flipped: rule}) == ["fc.weight -> fc.weight"]


def test_the_outermost_layer_is_heard():
    class Inner(nn.Layer):
        def __init__(self):
            super().__init__()
            self.w = self.create_parameter([2, 2])

        def _get_aoa_rules(self, direction):
            return {"w": "transpose"}

    class Outer(nn.Layer):
        def __init__(self):
            super().__init__()
            self.inner, self.other = Inner(), Inner()

        def _get_aoa_rules(self, direction):
            return {"inner.w": "copy"}

    assert gen_aoa_statements(Outer()) == ["inner.w -> inner.w", "other.w^T -> other.w"]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"wieght": "copy"}, r"AOA rule of Layer for 'wieght' names no parameter; the layer has \['bias', 'weight'\]"),
        ({"inner.weight": "copy"}, r"'inner.weight' names no parameter; inner has \[\]"),
        ({"weight": "transposed"}, "has to be one of copy, transpose, absent or a statement; got 'transposed'"),
        ({"weight": 1}, "got 1"),
        ({"weight": "{hf} -> {me}"}, "no other fields than hf, paddle, hf_layer, hf_parent"),
        ({"weight": "{hf} -> x"}, "has to have {paddle} in it"),
        ({"weight": "{hf_parent}.a -> {paddle}"}, "asks for {hf_parent}, but the checkpoint's name of 'weight' is"),
    ],
)
def test_wrong_rules(rule, text):
    with pytest.raises(ValueError, match=text):
        gen_aoa_statements(own(weight=[2, 2], bias=[2]), rules={nn.Layer: rule})


def test_a_rule_for_an_absent_bias_is_none():
    layer = own(weight=[2, 2])
    layer.bias = None
    assert gen_aoa_statements(layer, rules={nn.Layer: {"weight": "copy", "bias": "copy"}}) == ["weight -> weight"]


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_of_the_checkpoint():
    model = nn.Sequential(("a", nn.Linear(2, 3)), ("b", nn.LayerNorm(3)))
    names = {"a.weight": "x.weight", "a.bias": "x.bias", "b.weight": "gamma", "b.bias": "copy"}
    assert gen_aoa_statements(model, hf_names=names) == [
        "x.weight^T -> a.weight",
        "x.bias -> a.bias",
        "gamma -> b.weight",
        '"copy" -> b.bias',  # a word of the language
    ]
    del names["b.bias"]
    with pytest.raises(
        ValueError, match=r"hf_names has no name for 'b.bias'; got None. Remedy .FC606.: add one, or .*absent"
    ):
        gen_aoa_statements(model, hf_names=names)


def test_names_that_need_quotes():
    model = nn.Sequential(nn.Linear(2, 3, bias_attr=False), nn.Embedding(2, 2))
    statements = gen_aoa_statements(model, hf_names=lambda name: name.replace(".", "/w-"))
    assert statements == ['"0/w-weight"^T -> "0.weight"', '"1/w-weight" -> "1.weight"']
    assert all(len(parse(text)) == 1 for text in statements)


def test_a_name_that_nothing_can_quote_is_an_error():
    with pytest.raises(ValueError, match="cannot be written as a name"):
        gen_aoa_statements(nn.LayerNorm(2), hf_names=lambda name: f'"{name}"')


def test_tied_parameters_come_from_one_tensor():
    model = llama()

    class Head(nn.Layer):
        """No rule, but the embedding has one."""

        def __init__(self, weight):
            super().__init__()
            self.weight = weight

    model.lm_head = Head(model.model.embed_tokens.weight)
    assert gen_aoa_statements(model)[-1] == "model.embed_tokens.weight -> lm_head.weight"
    assert "lm_head.weight -> _" in gen_aoa_statements(model, "to_hf")
    # Whichever is described first.
    first = nn.Layer()
    first.head = Head(model.model.embed_tokens.weight)
    first.embedding = model.model.embed_tokens
    assert gen_aoa_statements(first) == [
        "embedding.weight -> head.weight",
        "embedding.weight -> embedding.weight",
    ]


def test_experts_have_their_numbers_in_the_whole_layer():
    class Experts(ExpertParallelMixin, nn.Layer):
        def __init__(self):
            super().__init__()
            self.moe_group = SimpleNamespace(rank=1, nranks=2, ranks=[0, 1])
            self.experts = nn.LayerList([nn.Linear(2, 3, bias_attr=False) for _ in range(2)])

    model = nn.Sequential(("mlp", Experts()))
    seen = []
    assert gen_aoa_statements(model, hf_names=lambda name: seen.append(name) or name) == [
        "mlp.experts.$LAYER_ID.weight^T -> mlp.experts.$LAYER_ID.weight"
    ]
    assert seen == ["mlp.experts.2.weight", "mlp.experts.3.weight"]


def test_a_pipeline_has_its_own_names(monkeypatch):
    descs = [LayerDesc(nn.Embedding, 4, 3), LayerDesc(MLP), LayerDesc(MLP), LayerDesc(nn.LayerNorm, 3)]
    (model,) = stages(monkeypatch, 1, descs)

    def hf_names(name):
        index, rest = name.split(".", 1)
        return {"0": f"embed.{rest}", "3": f"norm.{rest}"}.get(index, f"layers.{int(index) - 1}.{rest}")

    expert = "layers.$LAYER_ID.{0}_proj.weight^T -> ${{LAYER_ID+1}}.{0}_proj.weight"
    assert gen_aoa_statements(model, hf_names=hf_names) == [
        'embed.weight -> "0.weight"',
        *(expert.format(part) for part in ("gate", "up", "down")),
        'norm.weight -> "3.weight"',
        'norm.bias -> "3.bias"',
    ]
    back = "$LAYER_ID.{0}_proj.weight^T -> layers.${{LAYER_ID-1}}.{0}_proj.weight"
    assert gen_aoa_statements(model, "to_hf", hf_names=hf_names)[1:4] == [
        back.format(part) for part in ("gate", "up", "down")
    ]


def stages(monkeypatch, number, descs):
    """What each stage of a pipeline has, built in one process, and what each says to the others."""
    monkeypatch.setattr(paddle.distributed.ParallelEnv, "device_id", 0, raising=False)
    monkeypatch.setattr(PipelineLayer, "_construct_shared_comm", lambda self: {})
    topology = fleet.CommunicateTopology(["data", "pipe", "sharding", "model"], [1, number, 1, 1])
    models = []
    for rank in range(number):
        monkeypatch.setattr(paddle.distributed, "get_rank", lambda *_, rank=rank: rank)
        models.append(PipelineLayer(descs, topology=topology))
    return models


def together(monkeypatch, models, **kwargs):
    """The statements of ranks that call with one process group: every rank's answer."""
    said = []

    def gathers(answer):
        channel = SimpleNamespace(together=lambda work, context: (None, answer(work()[1])))
        monkeypatch.setattr(communicator, "communicator_for", lambda group: channel if group == "all" else None)

    gathers(lambda mine: said.append(mine) or [mine])
    for model in models:
        gen_aoa_statements(model, process_group="all", **kwargs)
    gathers(lambda mine: list(said))
    return [gen_aoa_statements(model, process_group="all", **kwargs) for model in models]


def test_ranks_with_different_layers_agree(monkeypatch):
    descs = [LayerDesc(nn.Embedding, 4, 3), *(LayerDesc(MLP) for _ in range(3)), LayerDesc(nn.LayerNorm, 3)]
    (whole,) = stages(monkeypatch, 1, descs)
    models = stages(monkeypatch, 2, descs)
    lonely = [gen_aoa_statements(model) for model in models]
    assert any('"1.up_proj.weight"' in text or '"3.up_proj.weight"' in text for text in lonely[0] + lonely[1])
    assert together(monkeypatch, models) == [gen_aoa_statements(whole)] * 2


def test_ranks_with_different_rules_are_an_error(monkeypatch):
    models = [own(w=[2, 2]), nn.Linear(2, 2, bias_attr=False)]
    models[1].w = models[1].weight
    del models[1].weight
    rules = {nn.Layer: {"w": "copy"}, nn.Linear: {"w": "transpose"}}
    with pytest.raises(ValueError, match="ranks have different AOA rules .* for 'w': .*on rank 1 of the group. Remedy"):
        together(monkeypatch, models, rules=rules)


def test_a_model_inside_a_wrapper():
    model = paddle.DataParallel(nn.Sequential(("fc", nn.Linear(2, 3, bias_attr=False))))
    assert gen_aoa_statements(model) == ["fc.weight^T -> fc.weight"]


def test_parameters_of_which_only_slices_are_there():
    model = nn.Sequential(("fc", nn.Linear(5, 7)))
    expected = gen_aoa_statements(model)
    SlicingWrapper(model, rank=1, nranks=4, padded=40)
    assert model.sharded_state_dict()["fc.weight"].is_flattened
    assert gen_aoa_statements(model) == expected == ["fc.weight^T -> fc.weight", "fc.bias -> fc.bias"]


# -- folding -----------------------------------------------------------------------------------------------------------


def test_layers_that_are_treated_differently_are_not_folded():
    model = nn.Sequential(nn.Linear(2, 2, bias_attr=False), nn.Embedding(2, 2), nn.Linear(2, 2, bias_attr=False))
    assert gen_aoa_statements(model) == ['"0.weight"^T -> "0.weight"', '"1.weight" -> "1.weight"',
                                         '"2.weight"^T -> "2.weight"']  # fmt: skip


def test_names_that_differ_in_more_than_numbers_are_not_folded():
    model = nn.Sequential(nn.LayerNorm(2, bias_attr=False), nn.LayerNorm(2, bias_attr=False))
    assert gen_aoa_statements(model) == ["$LAYER_ID.weight -> $LAYER_ID.weight"]
    assert gen_aoa_statements(model, hf_names={"0.weight": "first", "1.weight": "second"}) == [
        'first -> "0.weight"',
        'second -> "1.weight"',
    ]
    # Neither are those whose numbers differ by now this, now that.
    assert gen_aoa_statements(model, hf_names={"0.weight": "a.1.w", "1.weight": "a.0.w"}) == [
        'a.1.w -> "0.weight"',
        'a.0.w -> "1.weight"',
    ]


def test_numbers_that_do_not_differ_stay():
    model = nn.Sequential(*(nn.Sequential(nn.ReLU(), nn.LayerNorm(2, bias_attr=False)) for _ in range(2)))
    assert gen_aoa_statements(model) == ["$LAYER_ID.1.weight -> $LAYER_ID.1.weight"]


def test_as_many_statements_for_many_layers_as_for_few():
    assert gen_aoa_statements(Model([Block() for _ in range(40)])) == gen_aoa_statements(llama())


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_wrong_arguments():
    with pytest.raises(ValueError, match="direction is 'from_hf' or 'to_hf'; got 'hf'"):
        gen_aoa_statements(nn.Linear(2, 2), "hf")
    with pytest.raises(ValueError, match=r"list has no sharded_state_dict\(\). Remedy .FC804.: call .*install"):
        gen_aoa_statements([])


def test_a_tensor_that_is_in_no_layer_is_an_error():
    class Own(nn.Layer):
        def sharded_state_dict(self, structured_name_prefix=""):
            key = f"{structured_name_prefix}kernel"
            return {key: fc.make_replicated_sharded_weight(key, paddle.ones([2, 2]))}

    with pytest.raises(ValueError, match=r"'a.kernel' of sharded_state_dict\(\) is no parameter.*Remedy"):
        gen_aoa_statements(nn.Sequential(("a", Own())))
