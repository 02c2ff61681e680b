"""Pretrains a small Llama on text, with PaddleNLP's trainer: nothing in here knows of paddle_flexckpt.

The text is what a Python installation has: the sources of its standard library, byte by byte.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import paddle
from paddlenlp.trainer import PdArgumentParser, Trainer, TrainingArguments
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM, LlamaForCausalLMPipe

# Bytes come after the tokens that the model's configuration has a use for.
FIRST_BYTE = 3
VOCABULARY = 256 + 64


@dataclass
class ModelArguments:
    """The size of the model and of its inputs."""

    hidden_size: int = field(default=128, metadata={"help": "Width of the model."})
    num_layers: int = field(default=4, metadata={"help": "Number of layers."})
    text_length: int = field(default=64, metadata={"help": "Bytes of text in a sample."})


class Text(paddle.io.Dataset):
    """Stretches of the text, each with the same stretch one byte later as labels."""

    def __init__(self, length: int) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[: 4 << 20]
        ids = np.frombuffer(text, dtype=np.uint8).astype(np.int64) + FIRST_BYTE
        self._samples = ids[: (len(ids) - 1) // length * length + 1]
        self._length = length

    def __len__(self) -> int:
        return len(self._samples) // self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = index * self._length
        stretch = self._samples[start : start + self._length + 1]
        return {"input_ids": stretch[:-1], "labels": stretch[1:]}


def build_model(sizes: ModelArguments, args: TrainingArguments) -> paddle.nn.Layer:
    """The model, for the trainer's degrees of parallelism."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden_size,
        intermediate_size=3 * sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=sizes.text_length,
        seq_length=sizes.text_length,
        pad_token_id=0,
        use_flash_attention=False,
    )
    config.tensor_parallel_degree = max(args.tensor_parallel_degree, 1)
    config.tensor_parallel_rank = args.tensor_parallel_rank
    model_class = LlamaForCausalLMPipe if args.pipeline_parallel_degree > 1 else LlamaForCausalLM
    return model_class._from_config(config, dtype="float32")


def main() -> None:
    parser = PdArgumentParser((ModelArguments, TrainingArguments))
    sizes, args = parser.parse_args_into_dataclasses()
    paddle.set_device(args.device)
    paddle.seed(args.seed)
    trainer = Trainer(model=build_model(sizes, args), args=args, train_dataset=Text(sizes.text_length))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
