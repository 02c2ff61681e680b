"""Removals: one module removes, and nothing that removes follows a link."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import numpy as np
import pytest

import paddle_flexckpt
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.removals import leads_elsewhere, remove, removing
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.tools.memory_runs import note_root
from tests.transfer.samples import save

PACKAGE = Path(paddle_flexckpt.__file__).parent
# The calls that remove, and who may make them: this module; and who changes installed packages with the standard
# library alone. On remote storage media remove, which have no links.
REMOVING = {"rmtree", "unlink", "rmdir", "removedirs", "rm", "rm_file", "delete_object"}
REMOVERS = {"media/removals.py", "patching.py", "media/medium.py", "media/s3.py"}
RUN, STEP = "0123456789abcdef", "step_00000001"
VALUES = {"w": np.arange(8, dtype=np.float32)}


def is_removal(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        of_os = node.attr in ("remove", "unlink", "rmdir") and ast.unparse(node.value) == "os"
        return of_os or node.attr in REMOVING
    return isinstance(node, ast.alias) and node.name in REMOVING


def test_one_module_removes():
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(map(is_removal, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found <= REMOVERS
    assert "media/removals.py" in found


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    """The files below a directory: their bytes, and when they were changed."""
    return {str(each): (each.read_bytes(), each.stat().st_mtime_ns) for each in path.rglob("*") if each.is_file()}


# -- the removers ------------------------------------------------------------------------------------------------------
# Each prepares a root, and returns what to put elsewhere, with a link in its place; and the call that removes.


def retention(root):
    manager = pytest.importorskip("tests.manager.samples")
    made = manager.manager_of(root, keep=paddle_flexckpt.manager.KeepLatest(1))
    manager.save(made, 1)
    return root / STEP, lambda: [manager.save(made, step) for step in (2, 3)]


def dead_step(root):
    place, call = retention(root)
    (place / "0.manifest").unlink()
    (place / "0.saving").write_text("{}")
    return place, call


def memory(root, kind):
    pytest.importorskip("paddle")
    from tests.manager.samples import manager_of, values

    tier = paddle_flexckpt.MemoryTier(root / "shm", save_when=paddle_flexckpt.SaveEvery(1))
    manager = manager_of(root / "run", memory=tier, save_when=paddle_flexckpt.SaveEvery(4), process_group="self")

    def train(*steps):
        for step in steps:
            if manager.should_save(step):
                manager.save(step, state=values(step), rng=False, blocking=True)

    train(1)
    (place,) = (root / "shm").glob("*/step_*")
    if kind == "retention":
        return place, lambda: train(2, 3)
    return place, lambda: (train(2, 3, 4), manager.close())


def clean(root, *options):
    return lambda: main(["clean", str(root), "--remove", *options])


def tier_of(root):
    (root / RUN).mkdir(parents=True)
    note_root(LocalBackend(str(root / RUN)), "/shared/run")
    save(root / RUN / STEP, VALUES)
    return clean(root)


def clean_dead(root):
    save(root / "b", VALUES)
    (root / "b" / "0.saving").write_text("{}")
    (root / "b" / "0.manifest").unlink()
    return root / "b", clean(root)


def clean_one(root):
    save(root / "a", VALUES, step=1)
    save(root / "b", VALUES, step=2)
    return root / "b", clean(root, "--step", "2")


def trainer(root, name):
    from tests.trainer import test_directories

    directories = test_directories.TrainerDirectories(root)
    for step in (10, 20):
        test_directories.save(directories, step)
    return root / "checkpoint-10" / name, lambda: directories.rotate(1, None)


def export(root):
    pytest.importorskip("paddle")
    from paddle_flexckpt.trainer.contents import export_weights

    save(root / "flex_checkpoint", VALUES)
    export_weights(root, None)
    return root / "huggingface", lambda: export_weights(root, None)


def publisher(root):
    pytest.importorskip("zstandard")
    from tests.rollout.streams import publish_stream

    publish_stream(root, 1, keep=1)
    return root / "weight_v000001", lambda: publish_stream(root, 8, full_every=3, keep=1)


def apply(root, name):
    pytest.importorskip("zstandard")
    from paddle_flexckpt.rollout.local_copy import apply_version
    from tests.rollout.streams import publish_stream

    publish_stream(root / "v", 1)
    apply_version(root / "v", root / "local")
    place = root / "local" / ".weight_sync" / name
    place.mkdir(exist_ok=True)
    (place / "mine").write_text("mine")
    return place, lambda: apply_version(root / "v", root / "local")


def conversion(root):
    save(root / "in", VALUES)
    notes = root / "out" / f".convert-{'0' * 32}"
    notes.mkdir(parents=True)
    (notes / "plan.json").write_text('["mine"]')
    (root / "out" / "mine").write_text("mine")
    return notes, lambda: convert_checkpoint(root / "in", root / "out", restart=True)


REMOVERS_OF_USERS = {
    "retention": retention,
    "retention of a dead save": dead_step,
    "retention in memory": lambda root: memory(root, "retention"),
    "close": lambda root: memory(root, "close"),
    "clean a step in memory": lambda root: (root / RUN / STEP, tier_of(root)),
    "clean a run in memory": lambda root: (root / RUN, tier_of(root)),
    "clean a dead save": clean_dead,
    "clean a step": clean_one,
    "rotation": lambda root: trainer(root, ""),
    "rotation of what is inside": lambda root: trainer(root, "flex_checkpoint"),
    "export of a trainer": export,
    "publisher": publisher,
    "apply": lambda root: apply(root, ""),
    "apply, unfinished": lambda root: apply(root, "next"),
    "conversion": conversion,
}
REFUSE = {"apply", "apply, unfinished", "conversion", "export of a trainer"}


@pytest.mark.parametrize("name", REMOVERS_OF_USERS)
def test_no_remover_follows_a_link(tmp_path, caplog, name):
    place, call = REMOVERS_OF_USERS[name](tmp_path / "root")
    elsewhere = tmp_path / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    before = contents(elsewhere)
    assert before
    if name in REFUSE:
        with pytest.raises((ValidationError, OSError)):
            call()
    else:
        call()
    assert contents(elsewhere) == before
    assert place.is_symlink()
    assert [
        text for text in caplog.messages if f"{place} is a link to {elsewhere}: what is there is left alone" in text
    ]


def test_a_link_below_what_is_removed_goes_and_its_target_stays(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("mine")
    for name in ("file", "tree"):
        (tmp_path / "gone").mkdir()
        (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept" / (name if name == "file" else ""))
        remove(tmp_path / "gone", "tree")
        assert os.listdir(tmp_path) == ["kept"]
    (tmp_path / "link").symlink_to(tmp_path / "kept" / "file")
    remove(tmp_path / "link")
    assert contents(tmp_path).keys() == {str(tmp_path / "kept" / "file")}


def test_what_is_not_there_and_what_is_not_empty(tmp_path):
    for what in ("file", "empty", "tree"):
        remove(tmp_path / "nothing", what)
    (tmp_path / "a" / "b").mkdir(parents=True)
    remove(tmp_path / "a", "empty")
    assert (tmp_path / "a").exists()
    remove(tmp_path / "a" / "b", "empty")
    remove(tmp_path / "a", "empty")
    assert os.listdir(tmp_path) == []


def test_links_above_what_the_caller_names_are_followed(tmp_path):
    (tmp_path / "real" / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "c").symlink_to("a")
    root = LocalBackend(str(tmp_path / "link"))
    assert not leads_elsewhere(root)
    assert not leads_elsewhere(root.child("a").child("b"))
    assert root.child("c").child("b").link() == str(tmp_path / "link" / "c")
    with removing(root.child("c").child("b")) as is_free:
        assert not is_free
    with removing(root.child("a").child("b")) as is_free:
        assert is_free
        with removing(root.child("a").child("b")) as again:
            assert not again
