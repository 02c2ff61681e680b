"""How long it takes to open a checkpoint of torch.distributed.checkpoint of very many chunks, in processor time.

The checkpoint is imitated: tensors of equal chunks, one of each rank, in ``.metadata`` as torch pickles it after its
ranks have sent what they wrote, rank by rank, with the name of the tensor in each place. Archives of all chunks would
take gigabytes: a file has a hundred, of which each is several chunks'. Their bytes are those of ``torch.save``.

``metadata`` is the pickle alone; ``open`` is what a load does first: it looks at each chunk's archive, and checks that
the chunks are all of their tensors.

    python -m benchmarks.dcp_metadata                         # 100,000 chunks of 1,000 tensors: a minute or two
    python -m benchmarks.dcp_metadata --chunks 1000000
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import arguments, finish, row

SHAPE = (4, 8)
ARCHIVES = 100
BOUND = 12


def write(directory: Path, chunks: int, tensors: int) -> bytes:
    """Write the checkpoint; return what is in ``.metadata``."""
    from paddle_flexckpt.foreign.torch_saving import head_of, plan_archive, tail_of
    from tests.foreign.test_dcp_chunks import Tensor, metadata

    plan, ranks, data = plan_archive("float32", SHAPE), chunks // tensors, bytes(128)
    archive = head_of(plan) + data + tail_of(plan, zlib.crc32(data))
    for rank in range(ranks):
        (directory / f"__{rank}_0.distcp").write_bytes(archive * ARCHIVES)
    described = [
        Tensor(
            f"model.layers.{number}.mlp.up_proj.weight",
            (SHAPE[0] * ranks, SHAPE[1]),
            [
                ((SHAPE[0] * rank, 0), SHAPE, f"__{rank}_0.distcp", number % ARCHIVES * len(archive), len(archive))
                for rank in range(ranks)
            ],
        )
        for number in range(tensors)
    ]
    text = metadata(described, shuffle=_ByRank(), protocol=pickle.DEFAULT_PROTOCOL)
    (directory / ".metadata").write_bytes(text)
    return text


class _ByRank:
    """Put places into the order of the ranks that wrote them."""

    @staticmethod
    def shuffle(places: list) -> None:
        places.sort(key=lambda place: place[1].relative_path)


def seconds_of(work: Callable[[], object]) -> float:
    """Return the processor time that a call takes."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, pairs=3)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--tensors", type=int, default=1000)
    options = parser.parse_args(argv)
    from paddle_flexckpt.foreign.formats import SourceDirectory
    from paddle_flexckpt.foreign.torch_dcp import read_chunks

    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        text = write(Path(place), options.chunks, options.tensors)
        case = f"{options.chunks:,} chunks of {options.tensors:,} tensors"
        found = [
            (seconds_of(lambda: read_chunks(text, "f")), seconds_of(SourceDirectory(place).read_manifest))
            for _ in range(options.pairs)
        ]
        metadata, opened = zip(*found)
        rows = [
            row(f"metadata: {case}", metadata, unit="s of CPU", note=f"{len(text) / 1e6:.0f} MB"),
            row(f"open: {case}", opened, f"<= {BOUND}" if options.chunks <= 100_000 else "", "s of CPU"),
        ]
    finish(options, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
