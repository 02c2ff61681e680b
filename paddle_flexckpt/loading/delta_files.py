"""The files of a delta of a model: each rank has one, with a frame for each of its tensors that has changed.

Tested in tests/loading/test_weight_publisher.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.foreign.resolved_weights import ResolvedWeights
from paddle_flexckpt.foreign.weight_deltas import DeltaEncoder
from paddle_flexckpt.loading.model_files import ModelFiles
from paddle_flexckpt.tools.tensor_files import OutputDirectory, TensorFile, tensor_file

# Frames beyond this go to a temporary file.
SPOOL_BYTES = 256 << 20
# Of a tensor, with encoding="overwrite".
MOST_BYTES = 1 << 32


class DeltaFiles(ModelFiles):
    """One rank's deltas against the version before, of the tensors that it is given; one of these is in memory.

    Attributes:
        changed: The bytes of the frame of each of this rank's tensors that has changed.
    """

    def __init__(
        self,
        output: OutputDirectory,
        files: Sequence[TensorFile],
        infos: Mapping[str, TensorInfo],
        base: ResolvedWeights,
        encoding: str,
        checksum: str,
    ) -> None:
        """Touch nothing yet; ``base`` is the version before; ValidationError if it does not fit."""
        super().__init__(output, files, infos, "", is_shared=False)
        self._infos, self._base, self._encoding, self._checksum = infos, base, encoding, checksum
        self.changed: dict[str, int] = {}
        self._spool = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115
        # By tensor, the first byte of its frame there, and its checksum.
        self._frames: dict[str, tuple[int, str]] = {}
        here = {name: info.dtype + str([*info.shape]) for name, info in infos.items()}
        # The shapes of tensors of other ranks are not known: those ranks compare them.
        there = {name: here.get(name, "a tensor") for name in base.weights.file_of}
        there |= {name: f.dtype(name) + str([*f.tensors[name].shape]) for f in base.files for name in f.tensors}
        for key in sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name)):
            what, expected, got = f"{base.path} has other tensors", there.get(key, "none"), here.get(key, "none")
            remedy = "publish a full version (`publish(model, full=True)`)"
            raise ValidationError([Problem(what, key, expected=expected, got=got, code="FC308", remedy=remedy)])
        for key, info in infos.items():
            if encoding == "overwrite" and info.nbytes >= MOST_BYTES:
                what, remedy = "encoding='overwrite' counts bytes by 32 bits", "encoding='xor'"
                raise ValidationError([Problem(what, key, got=info.nbytes, code="FC705", remedy=remedy)])

    def writer(self, name: str) -> Callable[[memoryview, int], None]:
        """Return a function that takes bytes of a tensor, in order, and compares them with those before."""

        def add(data: memoryview, begin: int) -> None:
            if begin == 0:
                self._encoder = DeltaEncoder(self._base.tensor(name), self._encoding, self._checksum)
            self._encoder.add(np.asarray(data), begin)
            if begin + len(data) == self._infos[name].nbytes:
                found = self._encoder.finish()
                del self._encoder  # before the next tensor is read
                if found is not None:
                    self.changed[name], self._frames[name] = len(found[0]), (self._spool.tell(), found[1])
                    self._spool.write(found[0])

        return add

    def write_file(self, name: str) -> None:
        """Write this rank's file; OSError if the medium refuses."""
        infos = {each: TensorInfo((self.changed[each],), "uint8") for each in sorted(self.changed)}
        file = tensor_file(name, [*infos], infos, metadata={each: self._frames[each][1] for each in infos})
        self._output.write(file, self._stored(infos))

    def _stored(self, names: Iterable[str]) -> Iterator[np.ndarray]:
        for name in names:
            self._spool.seek(self._frames[name][0])
            yield np.frombuffer(self._spool.read(self.changed[name]), dtype=np.uint8)

    def close(self) -> None:
        """End the thread, and drop the frames."""
        super().close()
        self._spool.close()
