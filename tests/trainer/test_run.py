"""Scripts that know nothing of this library, started by paddle_flexckpt.trainer.run."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("paddlenlp")

SCRIPT = """
import sys
from paddlenlp.trainer import PdArgumentParser, Seq2SeqTrainingArguments, Trainer, get_last_checkpoint

(args,) = PdArgumentParser((Seq2SeqTrainingArguments,)).parse_args_into_dataclasses()
import beside
print("flags", args.flex_async_save, args.save_checkpoint_format, sys.argv[0] == __file__, __name__)
print("from", Trainer._save_checkpoint.__module__, get_last_checkpoint.__module__)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_has_the_flags_without_an_edit(tmp_path, as_module):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").touch()
    start = ["-m", "script"] if as_module else [str(tmp_path / "script.py")]
    flags = "--output_dir out --device cpu --flex_async_save 1 --save_checkpoint_format flex_checkpoint".split()
    done = subprocess.run(
        [sys.executable, "-m", "paddle_flexckpt.trainer.run", *start, *flags],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("flags", "from"))]
    assert lines == [
        "flags True flex_checkpoint True __main__",
        "from paddle_flexckpt.trainer.mixin paddle_flexckpt.trainer.installation",
    ]


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--help"]])
def test_without_a_script_it_says_how_to_use_it(arguments):
    command = [sys.executable, "-m", "paddle_flexckpt.trainer.run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "python -m paddle_flexckpt.trainer.run script.py" in done.stderr
