"""What importing the package costs, and that what it promises is there."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import paddle_flexckpt

ROOT = Path(__file__).resolve().parents[1]
# Circles that are still to be opened: nothing is to be added here.
KNOWN_CIRCLES: tuple[set[str], ...] = ()
FLOOR = (
    *("algebra", "catalog", "planning.write_plan", "aoa", "media.remote", "native.reader", "native.directory"),
    *("ranks.communicator", "foreign.formats", "report", "tools.export", "background.writer"),
    "rollout.vllm_extension",
)


def modules_after(statement: str) -> tuple[set[str], float]:
    """Top-level modules loaded by a statement in a fresh interpreter, and its seconds without the interpreter's own."""
    code = (
        "import sys, time; begin = time.perf_counter(); "
        f"{statement}; seconds = time.perf_counter() - begin; "
        "import json; print(json.dumps([sorted({name.split('.')[0] for name in sys.modules}), seconds]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names, seconds = json.loads(done.stdout.splitlines()[-1])
    return set(names), seconds


def test_the_top_level_imports_neither_paddle_nor_numpy():
    begin = time.perf_counter()
    names, seconds = modules_after("import paddle_flexckpt")
    print(f"import paddle_flexckpt: {seconds * 1e3:.1f} ms, {(time.perf_counter() - begin) * 1e3:.0f} ms with Python")
    assert "paddle_flexckpt" in names
    assert not {"paddle", "numpy", "ml_dtypes", "safetensors", "xxhash"} & names


@pytest.mark.parametrize("package", FLOOR)
def test_the_numpy_floor_does_not_import_paddle(package):
    names, seconds = modules_after(f"import paddle_flexckpt.{package}")
    print(f"import paddle_flexckpt.{package}: {seconds * 1e3:.0f} ms")
    assert "paddle_flexckpt" in names
    assert not {"paddle", "torch"} & names
    assert "numpy" in names


@pytest.mark.parametrize(
    "name",
    ["ValidationError", "rehearse", "diff", "Metadata", "verify_checkpoint", "export_safetensors", "BackgroundWriter"],
)
def test_a_name_of_the_floor_does_not_import_paddle(name):
    names, _ = modules_after(f"from paddle_flexckpt import {name}")
    assert "paddle" not in names


@pytest.mark.paddle
def test_the_data_room_needs_no_import_of_its_own():
    pytest.importorskip("paddle")
    code = (
        "import sys, paddle_flexckpt as fc; assert 'paddle_flexckpt.data' not in sys.modules; "
        "assert fc.data.ElasticBatchSampler is fc.ElasticBatchSampler; assert fc.data.ElasticStream is fc.ElasticStream"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_collecting_the_tests_of_the_floor_does_not_import_paddle():
    # What macros expand to is compared with Paddle's own engine.
    rooms = [
        "--ignore=tests/aoa/test_expansion.py",
        *(f"tests/{room}" for room in ("algebra", "catalog", "planning", "aoa")),
    ]
    names, seconds = modules_after(
        f"import pytest; pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider', *{rooms}])"
    )
    print(f"collecting: {seconds:.1f} s")
    assert "_pytest" in names
    assert "paddle" not in names


@pytest.mark.paddle
def test_a_plain_load_imports_at_most_100_modules_of_the_package(tmp_path):
    pytest.importorskip("paddle")
    code = (
        "import sys, numpy, paddle_flexckpt as fc\n"
        "target = {'w': numpy.zeros(3, 'f4')}\n"
        "fc.{call}\n"
        "print(sum(name.split('.')[0] == 'paddle_flexckpt' for name in sys.modules), int(target['w'].sum()))"
    )
    path = str(tmp_path / "checkpoint")
    calls = f"save_state_dict({{'w': numpy.ones(3, 'f4')}}, {path!r})", f"load_state_dict(target, {path!r})"
    for call in calls:
        command = [sys.executable, "-c", code.replace("{call}", call)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    count, loaded = map(int, done.stdout.split())
    assert loaded == 3
    assert count <= 100


@pytest.mark.paddle
def test_every_public_name_resolves():
    pytest.importorskip("paddle")
    assert len(set(paddle_flexckpt.__all__)) == len(paddle_flexckpt.__all__)
    for name in paddle_flexckpt.__all__:
        assert getattr(paddle_flexckpt, name) is not None, name
    assert set(dir(paddle_flexckpt)) >= set(paddle_flexckpt.__all__)


def test_public_names_are_few_and_moved_ones_say_where_they_are():
    assert len(paddle_flexckpt.__all__) <= 60
    for module, names in paddle_flexckpt._MOVED.items():
        for name in names:
            with pytest.raises(AttributeError, match=f"it is in paddle_flexckpt.{module}$"):
                getattr(paddle_flexckpt, name)


NAMES_OF_PADDLE = (
    "get_rank_to_files _modify_mw_name_for_compatibility check_src_state_dict_validity check_dst_state_dict_validity "
    "check_src_dst_state_dict_validity AOAShardInfoContext load_state_dict_metadata"
)


@pytest.mark.parametrize("name", NAMES_OF_PADDLE.split())
def test_names_of_paddle_that_are_not_here_say_what_does_their_work(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': ") as error:
        getattr(paddle_flexckpt, name)
    named = set(re.findall(r"(\w+)\(", str(error.value)))
    assert named
    assert named <= set(paddle_flexckpt.__all__)


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    """Return the modules that reach themselves by what they import, grouped with those they share a circle with."""
    reach = {module: set(direct) for module, direct in imported.items()}
    for over in reach:
        for module in reach:
            if over in reach[module]:
                reach[module] |= reach[over]
    found = {frozenset(other for other in reach[module] if module in reach[other]) for module in reach}
    return sorted(sorted(circle) for circle in found if circle)


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}) == [["b", "c"], ["e"]]


def test_no_module_imports_itself_by_others():
    """Not inside a room either, and not by imports inside functions or for type checkers."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("paddle_flexckpt", cache_dir=None)
    root = "paddle_flexckpt."
    # The package's own module imports everything for type checkers, and nothing at run time.
    modules = [module for module in graph.modules if module.startswith(root)]
    imported = {
        module.removeprefix(root): {
            other.removeprefix(root) for other in graph.find_modules_directly_imported_by(module) if other in modules
        }
        for module in modules
    }
    assert len(imported) > 200
    new = [circle for circle in circles(imported) if not any(known.issuperset(circle) for known in KNOWN_CIRCLES)]
    assert not new, "\n".join(" -> ".join([*circle, circle[0]]) for circle in new)


def test_abstract_classes_are_small():
    """Whoever implements one has a dozen methods to write and not more."""
    found = {}
    for path in sorted((ROOT / "paddle_flexckpt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(
                getattr(base, "id", "") in ("ABC", "Protocol") for base in node.bases
            ):
                methods = [member for member in node.body if isinstance(member, ast.FunctionDef)]
                abstract = [
                    m for m in methods if any(getattr(d, "id", "") == "abstractmethod" for d in m.decorator_list)
                ]
                found[node.name] = len(abstract or methods)
    assert found["Backend"] == 9
    assert {name: count for name, count in found.items() if count > 12} == {}


def type_checking_imports() -> dict[str, str]:
    """Names imported for type checkers, with their modules."""
    tree = ast.parse(Path(paddle_flexckpt.__file__).read_text(encoding="utf-8"))
    (block,) = [
        node for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]  # fmt: skip
    found = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        for alias in statement.names:
            found[alias.asname or alias.name] = statement.module.removeprefix("paddle_flexckpt.")
    return found


def test_type_checkers_see_what_the_lazy_table_gives():
    assert type_checking_imports() == paddle_flexckpt._HOME
    assert {*paddle_flexckpt.__all__, *paddle_flexckpt._OF_PADDLE} == {*paddle_flexckpt._HOME, "__version__"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        paddle_flexckpt.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("saev", "save"), ("CheckpointManger", "CheckpointManager"), ("load_statedict", "load_state_dict")],
)
def test_a_mistyped_name_names_the_nearest(typed, meant):
    with pytest.raises(AttributeError, match=f"has no attribute '{typed}'; did you mean '{meant}'.$"):
        getattr(paddle_flexckpt, typed)
    assert not hasattr(paddle_flexckpt, f"__{typed}__")


@pytest.mark.paddle
def test_help_lists_the_arguments_of_the_signature():
    """Each once, in the docstring of each public call with options, and none by a reference to another call."""
    pytest.importorskip("paddle")
    import inspect

    found = {}
    for name in paddle_flexckpt.__all__:
        call = getattr(paddle_flexckpt, name)
        for each in (call, *vars(call).values()) if inspect.isclass(call) else (call,):
            if hasattr(each, "options_of_the_call"):
                found[f"{name}.{each.__name__}"] = each
    assert {"save.save", "load.load", "check.check", "CheckpointManager.restore", "CheckpointManager.__init__"} <= {
        *found
    }
    for name, each in found.items():
        text = re.split(r"\n(?:Returns|Raises):\n", inspect.getdoc(each).partition("Args:\n")[2])[0]
        told = re.findall(r"^    (\*{0,2}\w+): ", text, re.MULTILINE)
        wanted = [one for one in inspect.signature(each).parameters if one != "self"]
        assert sorted({*told}) == sorted(told) and {*told} <= {*wanted}, name
    for name in ("save.save", "load.load", "check.check"):
        assert "As in :func:" not in inspect.getdoc(found[name])
