"""The numpy floor starts without Paddle, installed or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("paddle", "paddlenlp", "torch"):
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, Refuse())
import pkgutil, importlib
package = importlib.import_module(sys.argv[1])
names = [package.__name__] + [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
assert len(names) > 1, names
"""


@pytest.mark.parametrize(
    "package", ["algebra", "catalog", "planning", "aoa", "media", "native", "foreign", "transfer", "tools"]
)
def test_package_imports_without_paddle(package):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"paddle_flexckpt.{package}"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
