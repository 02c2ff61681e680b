"""Examples of the guide, of other documents and of docstrings run and do what is said beside them.

Those of one process are called with the names that they leave to the reader. The jobs: code of documents, as printed.
"""

from __future__ import annotations

import contextlib
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
from paddle import nn
from safetensors.numpy import load_file, save_file

import paddle_flexckpt as fc
from tests.distributed.test_readme import run
from tests.documents import code_block, docstring_block, output_block

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
HEADS, GROUPS, HIDDEN, INNER, VOCABULARY = 32, 8, 32, 12, 6


def execute(code: str, /, **names) -> SimpleNamespace:
    """Run code that takes some names as given; return what it leaves."""
    found = {"fc": fc, "paddle": paddle, "__name__": "__main__", **names}
    exec(compile(code, "example", "exec"), found)
    return SimpleNamespace(**found)


@contextlib.contextmanager
def installed():
    """``fc.install()`` in effect, and as before afterwards."""
    from paddle_flexckpt.parallel.install import is_installed

    before = is_installed()
    fc.install()
    try:
        yield
    finally:
        if not before:
            fc.uninstall()


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Given:
    """A model that describes itself by what it was given."""

    def __init__(self, **state):
        self.state = {name.replace("__", "."): value for name, value in state.items()}

    def sharded_state_dict(self):
        return self.state


def trained(schedule=False):
    """A layer, its optimizer and, if asked for, the schedule."""
    with paddle.utils.unique_name.guard():
        model = nn.Linear(4, 4)
    scheduler = paddle.optimizer.lr.StepDecay(0.1, 3)
    optimizer = paddle.optimizer.AdamW(scheduler if schedule else 0.1, parameters=model.parameters())
    return model, optimizer, scheduler


# -- one process: saving and loading -----------------------------------------------------------------------------------


def test_saves_in_the_background():
    batches = []
    code = code_block("docs/guide.md", "writer = fc.BackgroundWriter()  # once")
    left = execute(code, loader=range(1001), train=batches.append, state={"w": paddle.ones([4])})
    left.writer.close()
    assert batches == [*range(1001)]
    assert all(fc.verify_checkpoint(f"checkpoints/{step}").ok for step in (0, 1000))


def test_what_the_demo_asks_of_the_library():
    model, optimizer, _ = trained()
    source, target = {"w": paddle.ones([4])}, {"w": paddle.zeros([4])}
    names = {"model": model, "optimizer": optimizer, "path": "demo", "source_state": source, "target_state": target}
    try:
        left = execute(code_block("examples/tensor_parallel_lm/README.md", "fc.install()"), **names)
    finally:
        fc.uninstall()
    assert len(left.state) == 2 + 2 * 4
    assert target["w"].numpy().tolist() == [1.0] * 4


def test_a_save_in_slices():
    model, optimizer, _ = trained()
    with installed(), fc.BackgroundWriter() as writer:
        state = model.sharded_state_dict()
        saved = model.weight.numpy()
        execute(
            code_block("docs/guide.md", "handle.stage_next()  # at most 64 MiB"),
            **{"state": state, "path": "a", "writer": writer, "optimizer": optimizer, "model": model},
            batch=[paddle.ones([1, 4])] * 2,
            loss=lambda model, batch: model(batch).sum(),
        )
        writer.close()
    assert (fc.load_merged_state_dict("a")["weight"].numpy() == saved).all()
    assert (model.weight.numpy() != saved).any()


def test_the_manager_stages_in_slices():
    model, optimizer, scheduler = trained(schedule=True)
    with fc.CheckpointManager("run", async_save=True, slice_bytes=64 << 20) as manager:
        execute(
            code_block("docs/manager.md", "manager.stage_next()  # a slice"),
            **{"manager": manager, "model": model, "optimizer": optimizer, "scheduler": scheduler},
            start=0,
            steps=3,
            batches=lambda step: [paddle.full([1, 4], float(step))] * 2,
            loss=lambda model, batch: model(batch).sum(),
        )
        optimizer.step()  # nobody stages the last one
    fc.uninstall()
    assert [info.step for info in fc.list_checkpoints("run")] == [1, 2, 3]


def test_plain_tensors():
    left = execute(code_block("docs/guide.md", "# nested dicts of plain tensors"))
    assert (left.whole["model.w"].numpy() == left.state["model"]["w"].numpy()).all()
    assert int(left.whole["step"]) == 7


def test_the_extra_state_of_a_run(capsys):
    code = {
        "guide": code_block("docs/guide.md", "# tensors; JSON inside, no pickle"),
        "module": docstring_block("paddle_flexckpt/run_state/extra_state.py", "fc.save_state_dict"),
    }
    _, _, scheduler = trained(schedule=True)
    state = {"w": paddle.ones([4])}
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    left = execute(code["guide"], scheduler=scheduler, scaler=scaler, step=5, state=state)
    assert left.report.step == 5
    from paddle_flexckpt import run_state

    names = {**vars(run_state), "scheduler": scheduler, "scaler": scaler, "step": 6, "path": "other"}
    left = execute(code["module"], **names, model=state, optimizer={"m": paddle.ones([4])})
    assert left.step == 6


# -- one process: statements -------------------------------------------------------------------------------------------


def llama() -> dict[str, np.ndarray]:
    """Weights of one layer under Hugging Face's names, with as many heads as the guide says."""
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (HIDDEN * GROUPS // HEADS, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (HIDDEN * GROUPS // HEADS, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


@pytest.fixture
def hugging_face(directory):
    (directory / "hf").mkdir()
    save_file(llama(), directory / "hf" / "model.safetensors")
    return llama()


def test_statements_fill_a_model_of_other_names(hugging_face, capsys):
    def model(**more):
        down, up_gate = paddle.zeros([INNER, HIDDEN]), paddle.zeros([HIDDEN, 2 * INNER])
        return Given(layers__0__down__weight=down, layers__0__up_gate__weight=up_gate, **more)

    for code, embed in {
        code_block("README.md", "mlp.down_proj.weight^T"): {},
        code_block("docs/guide.md", "mlp.down_proj.weight^T"): {"embed__weight": paddle.ones([152064, HIDDEN])},
    }.items():
        target = model(**embed)
        left = execute(code, model=target, path="hf")
        gate, up = (hugging_face[f"model.layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        down = hugging_face["model.layers.0.mlp.down_proj.weight"].T
        assert (target.state["layers.0.down.weight"].numpy() == down).all()
        assert (target.state["layers.0.up_gate.weight"].numpy() == np.concatenate([gate, up], axis=1)).all()
        assert "model.layers.0.mlp.down_proj.weight" in capsys.readouterr().out
    table = target.state["embed.weight"].numpy()
    assert (table[:VOCABULARY] == hugging_face["model.embed_tokens.weight"]).all() and not table[VOCABULARY:].any()
    whole = fc.load_merged_state_dict("hf", aoa_config=left.rules)
    assert "model.layers.0.self_attn.qkv_proj.weight" in whole


def test_the_first_statements_of_the_page(hugging_face):
    target = Given(embed__weight=paddle.zeros([6, HIDDEN]), layers__0__attn__q__weight=paddle.zeros([HIDDEN, HIDDEN]))
    execute(code_block("docs/aoa.md", "aoa_config = {"), model=target, path="hf")
    expected = hugging_face["model.layers.0.self_attn.q_proj.weight"].T
    assert (target.state["layers.0.attn.q.weight"].numpy() == expected).all()
    assert (target.state["embed.weight"].numpy() == hugging_face["model.embed_tokens.weight"]).all()


def test_a_model_is_published_under_hugging_faces_names(hugging_face, directory):
    rules = fc.model_rules("llama", "fused", num_heads=HEADS, num_key_value_groups=GROUPS)
    model = Given()
    model.state = fc.load_merged_state_dict("hf", aoa_config=rules)
    execute(code_block("docs/guide.md", "fc.publish(model"), model=model)
    found = load_file(directory / "out" / "model.safetensors")
    assert found.keys() == hugging_face.keys()
    assert all(found[name].tobytes() == value.tobytes() for name, value in hugging_face.items())
    assert json.loads((directory / "out" / "config.json").read_text())["num_attention_heads"] == HEADS


def test_statements_for_plain_states(directory):
    with paddle.utils.unique_name.guard():
        model = nn.Sequential(("a", nn.Linear(4, 4)))
    scheduler = paddle.optimizer.lr.StepDecay(0.1, 3)
    optimizer = paddle.optimizer.AdamW(scheduler, parameters=model.parameters())
    model(paddle.ones([1, 4])).sum().backward()
    optimizer.step()
    with installed():
        left = execute(code_block("docs/semi_auto.md", "fc.plain_state_statements"), model=model, optimizer=optimizer)
        assert "model.a.weight -> a.weight" in left.statements
        # The last number counts the optimizers that this process has made.
        named = [re.sub(r"_\d+ -> ", "_0 -> ", each) for each in left.statements]
        assert "optimizer.linear_0.w_0_moment1_0 -> a.weight.moment1_0" in named
        before = model.a.weight.numpy()
        code = code_block("docs/semi_auto.md", 'plain["optimizer"].pop')
        changes = "plain['model']['a.weight'].set_value(paddle.zeros([4, 4])); scheduler.step()"
        execute(code.replace("...", changes), plain=left.plain, path="plain", scheduler=scheduler)
    assert (model.a.weight.numpy() == before).all() and scheduler.last_epoch == 0


# -- one process: progress, reports, observers, layers -----------------------------------------------------------------


class LogWriter:
    """As VisualDL's."""

    def __init__(self, path):
        self.path, self.tags = path, []

    def add_scalar(self, tag, value, step):
        self.tags.append(tag)


def test_progress_reports_and_observers(capsys, monkeypatch):
    from paddle_flexckpt import observers

    monkeypatch.setattr(observers, "_OBSERVATIONS", [])  # those of the examples go with the test
    state = {"w": paddle.ones([4])}
    fc.save_state_dict(state, "checkpoints")
    execute(code_block("docs/telemetry.md", "def show(progress)"), state=state)
    assert capsys.readouterr().out.splitlines()[-1] == "read 16 of 16 bytes"
    execute(code_block("docs/telemetry.md", "report.to_json()"), state=state)
    assert capsys.readouterr().out.startswith("loaded 1 tensor on this rank from checkpoints")
    page = code_block("docs/telemetry.md", "PrometheusObserver()")
    docstring = docstring_block("paddle_flexckpt/observers.py", "PrometheusObserver()")
    writers = []

    def log_writer(path):
        writers.append(LogWriter(path))
        return writers[-1]

    verify = 'fc.verify_checkpoint("checkpoints")'
    execute(page.replace("...", verify, 1), LogWriter=log_writer)
    assert capsys.readouterr().out.startswith("verify checkpoints ")
    left = execute(docstring.replace("...", verify), PrometheusObserver=observers.PrometheusObserver)
    assert 'flexckpt_calls_total{call="verify",outcome="ok"} 1' in left.metrics.render()
    assert "flexckpt/verify/seconds/total" in writers[0].tags


def test_options_and_meters_as_their_modules_show_them():
    from paddle_flexckpt.progress import Meter
    from paddle_flexckpt.transfer import options

    names = {**vars(options), **vars(__import__("dataclasses"))}
    left = execute(docstring_block("paddle_flexckpt/transfer/options.py", "class SaveOptions"), **names)
    left.save("a", step=3)
    assert "storage" in left.save.__doc__ or "storage" in str(left.save.__signature__)
    told = []
    execute(
        docstring_block("paddle_flexckpt/progress.py", "meter.finish()"),
        **{"Meter": Meter, "callback": told.append, "write": print, "bytes_total": 12, "items_total": 3},
        tensors=[np.ones(1, np.float32)] * 3,
    )
    assert (told[0].bytes_done, told[-1].bytes_done, told[-1].items_done) == (0, 12, 3)


def test_rules_for_layers_of_somebody_else():
    from paddle_flexckpt.trainer.model_rules import unregister_model_rule
    from paddle_flexckpt.trainer.model_rules.axes import registered_axes

    class TheirHead(nn.Layer):
        transpose_y = True

    try:
        execute(code_block("docs/model_rules.md", "register_model_rule"), TheirHead=TheirHead)
        assert registered_axes(TheirHead(), nn.Layer) == {"weight": 0}
    finally:
        unregister_model_rule(TheirHead)
        unregister_model_rule("their_library.layers.CutTable")


# -- what each rank runs -----------------------------------------------------------------------------------------------


def own_columns(code):
    """Global shape and offset of each parameter of a layer of one's own on this rank."""
    import paddle.distributed as dist

    layer_class = execute(code).MyColumns

    class Mine(layer_class):
        def __init__(self):
            super().__init__()
            self.my_group = dist.new_group([0, 1])
            self.weight = self.create_parameter([3, 4])
            self.bias = self.create_parameter([4])
            self.weight.is_distributed = self.bias.is_distributed = True

    with installed():
        described = Mine().sharded_state_dict()
    return {key: [*each.global_shape, *each.global_offset] for key, each in described.items()}


def own_experts(code):
    """Names of the experts of this rank."""
    import paddle.distributed as dist

    from paddle_flexckpt.parallel.experts import ExpertParallelMixin

    names = {"Gate": lambda count: nn.Linear(2, count), "Expert": lambda: nn.Linear(2, 2)}
    layer = execute(code, ExpertParallelMixin=ExpertParallelMixin, **names).MyMoE(4, dist.new_group([0, 1]))
    with installed():
        return sorted(key for key in layer.sharded_state_dict() if key.startswith("experts") and "weight" in key)


def parallelized(code, example, directory):
    """What a parallelized model has after its load, and the step that the manager of the example restores."""
    import os

    import paddle.distributed as dist

    os.chdir(directory)
    mesh = dist.ProcessMesh([0, 1], dim_names=["mp"])
    dist.auto_parallel.set_mesh(mesh)
    config = {"mp_config": {"parallelize_plan": {"a": dist.ColWiseParallel()}}}
    names = {"dist": dist, "mesh": mesh, "path": "semi"}

    def fresh():
        paddle.seed(1)
        model = nn.Sequential(("a", nn.Linear(4, 4)))
        scheduler = paddle.optimizer.lr.StepDecay(0.1, 3)
        return {
            "model": model,
            "scheduler": scheduler,
            "optimizer": paddle.optimizer.AdamW(scheduler, parameters=model.parameters()),
        }

    try:
        left = execute(code.replace("...", "CONFIG"), CONFIG=config, **names, **fresh())
        for step in (1, 2):
            again = example.replace("config=...", "config=CONFIG").replace(
                "    ...\n", "    restored = manager.latest_step()\n"
            )
            found = execute(again, CONFIG=config, step=step, **names, **fresh())
        return sorted(left.state), found.restored, list(left.model.a.weight._local_shape)
    finally:
        fc.uninstall()


# -- what is asserted --------------------------------------------------------------------------------------------------


def test_a_layer_and_experts_of_ones_own(world2):
    shapes = world2.run(own_columns, code=code_block("docs/guide.md", "class MyColumns"))
    assert shapes == [{"weight": [3, 8, 0, 4 * rank], "bias": [8, 4 * rank]} for rank in (0, 1)]
    names = world2.run(own_experts, code=docstring_block("paddle_flexckpt/parallel/experts.py", "class MyMoE"))
    assert names == [[f"experts.{2 * rank + i}.weight" for i in (0, 1)] for rank in (0, 1)]


def masked(line: str) -> str:
    """A line without what a clock has said."""
    return re.sub(r"[\d.]+ s, [\d.]+ \w+/s", "TIME", line)


def test_live_state_moves_between_layouts(world2, directory):
    code = code_block("docs/guide.md", "# reshard.py")
    code += code_block("docs/guide.md", "plan = fc.plan_reshard(source, target)") + "print(report.bytes_received)\n"
    first, _ = world2.run(run, code=code, directory=str(directory))
    line, received = first.splitlines()[-2:]
    assert [masked(line)] == [masked(each) for each in output_block("docs/guide.md", "resharded 1 tensor").splitlines()]
    assert received == "64"


def test_semi_automatic_parallel(world2, directory):
    printed = world2.run(run, code=code_block("docs/guide.md", "# semi_auto.py"), directory=str(directory))
    expected = output_block("docs/guide.md", "0 [[0.0, 1.0]").splitlines()
    assert [text.splitlines()[-1] for text in printed] == expected


def test_parallelized_models_describe_themselves(world2, directory):
    code = code_block("docs/semi_auto.md", "dist.parallelize(model, optimizer, mesh, config=...)")
    code += code_block("docs/semi_auto.md", "fc.save_state_dict({**model_state")
    example = code_block("examples/semi_auto/README.md", "dist.parallelize")
    for keys, restored, shape in world2.run(parallelized, code=code, example=example, directory=str(directory)):
        assert "a.weight.moment1_0" in keys
        assert restored == 1
        assert shape == [4, 2]
    assert [info.step for info in fc.list_checkpoints("ckpt")] == [1, 2]
