"""An engine's weights, read to the device while Python still imports torch and everything else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmctl.builder.engine_format import engine_file, read_ranges
from llmctl.errors import LlmctlError
from llmctl.plugins.backends.cuda.load_ahead import DeviceMemory, ReadingAhead
from llmctl.runtime.engines.weight_places import weight_places


@dataclass(frozen=True, slots=True)
class WeightsAhead:
    """The reading of one engine file, into memory as `weight_places` divides it."""

    reading: ReadingAhead

    @classmethod
    def begin(cls, folder: Path) -> WeightsAhead | None:
        """Of an engine of one rank, on the first device. What is not stored is left for whoever
        makes it; of an engine that stores none, the device's context is made. None where that
        cannot begin: whoever opens the engine says why."""
        path = folder / engine_file(0)
        try:
            plan, ranges = read_ranges(folder)
            places, num_bytes = weight_places(plan)
            pieces = [(*ranges[name], at) for name, (at, _) in places.items() if name in ranges]
            return cls(ReadingAhead(path, pieces, num_bytes if pieces else 0))
        except (LlmctlError, OSError):
            return None

    @property
    def held_bytes(self) -> int:
        """Device memory that it has taken."""
        return self.reading.held_bytes

    def take_memory(self, path: Path, num_bytes: int) -> DeviceMemory | None:
        """The memory of the engine file `path`, whose weights take num_bytes; None where another
        file is read, or there was no memory."""
        now, then = path.stat(), self.reading.file
        is_same = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns) == (
            then.st_dev, then.st_ino, then.st_size, then.st_mtime_ns,
        )  # fmt: skip
        if not is_same or self.held_bytes != num_bytes:
            return None
        return self.reading.take_memory()
