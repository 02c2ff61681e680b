"""Each recipe of examples/recipes prints what docs/recipes.md says, under each layout that its commands name.

The jobs: the scripts, as they are.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("paddle")
from tests.documents import ROOT, every_block

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
RECIPES = ROOT / "examples" / "recipes"
RUN = re.compile(r"^python -m paddle\.distributed\.launch --nproc_per_node (\d) (\w+)\.py(.*)$", re.M)

# -- what each rank runs -----------------------------------------------------------------------------------------------


def run(recipe, arguments, directory):
    """What a recipe prints on this rank, in a directory of its own."""
    path = RECIPES / f"{recipe}.py"
    printed, cwd, argv = io.StringIO(), os.getcwd(), sys.argv
    os.chdir(directory)
    sys.argv = [str(path), *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(cwd)
        sys.argv = argv
    return printed.getvalue()


# -- what is asserted --------------------------------------------------------------------------------------------------

COMMANDS = every_block("docs/recipes.md", "bash")
OUTPUTS = every_block("docs/recipes.md", "")


@pytest.mark.parametrize(
    ("commands", "output"), list(zip(COMMANDS, OUTPUTS)), ids=[RUN.findall(text)[0][1] for text in COMMANDS]
)
def test_a_recipe_prints_what_its_page_says(world, tmp_path, commands, output):
    lines = []
    for ranks, recipe, arguments in RUN.findall(commands):
        first, *others = world(int(ranks)).run(run, recipe=recipe, arguments=arguments.split(), directory=str(tmp_path))
        assert not any(others), "rank 0 alone prints"
        lines += first.splitlines()
    assert lines == output.splitlines()


def _needs_ranks(path):
    return "Start it with the launcher" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", filter(_needs_ranks, sorted(RECIPES.glob("*.py"))), ids=lambda path: path.stem)
def test_a_recipe_that_needs_ranks_says_how_it_is_started(path, tmp_path):
    command = [sys.executable, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "Start it with the launcher, on that many ranks:" in done.stderr
    assert f"python -m paddle.distributed.launch --nproc_per_node 2 {path.name}" in done.stderr


@pytest.mark.parametrize("recipe", ["tensor_parallel_sharding", "semi_automatic"])
def test_a_recipe_with_degrees_runs_on_one_rank(tmp_path, recipe):
    words = [sys.executable, str(RECIPES / f"{recipe}.py"), "1", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = [subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True) for _ in range(2)]
    lines = [[line for line in each.stdout.splitlines() if line.startswith("step ")] for each in done]
    assert lines[0][2:] == lines[1] and len(lines[1]) == 2, done[0].stderr


def test_every_recipe_is_short_and_has_its_place_in_the_page():
    assert len(COMMANDS) == len(OUTPUTS)
    assert all(len(RUN.findall(text)) == len(text.splitlines()) for text in COMMANDS)
    scripts = {path.stem: path.read_text(encoding="utf-8") for path in RECIPES.glob("*.py")}
    assert {recipe for text in COMMANDS for _, recipe, _ in RUN.findall(text)} == set(scripts)
    assert [name for name, text in scripts.items() if len(text.splitlines()) > 80] == []
