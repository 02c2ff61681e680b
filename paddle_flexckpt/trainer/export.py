"""Write the weights of a trainer's checkpoint in Hugging Face's format. Tested in tests/trainer/test_trainer.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from paddle_flexckpt.engine.export import export_safetensors
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.trainer.contents import is_peft
from paddle_flexckpt.trainer.directories import SUBDIRECTORY
from paddle_flexckpt.trainer.model_rules import hf_rules

EXPORTED = "huggingface"


def export_weights(trainer: Any, directory: Path) -> None:
    """Write the model's weights of a complete checkpoint as safetensors with Hugging Face's names and layouts.

    They go to ``{directory}/huggingface``, which is there when it is complete; configuration and tokenizer are copied
    beside them. One process does it.

    Raises:
        ValidationError: There are no rules for this model; nothing was written.
        OSError: The file system refused; likewise.
    """
    model = trainer.model
    if is_peft(model):
        rules = None  # the wrapper's names are the adapter's own
    else:
        rules = hf_rules(type(model), model.config)["to_hf"]
    unfinished, output = directory / f"{EXPORTED}.unfinished", directory / EXPORTED
    for path in (unfinished, output):
        if path.exists():
            shutil.rmtree(path)
    try:
        export_safetensors(directory / SUBDIRECTORY, unfinished, rules)
        for path in sorted(directory.iterdir()):
            if path.is_file() and path.suffix in (".json", ".txt", ".model") and not path.name.startswith(_OWN):
                shutil.copyfile(path, unfinished / path.name)
        unfinished.rename(output)
        open_backend(directory).sync()
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


_OWN = ("trainer_state", "flex_checkpoint")
