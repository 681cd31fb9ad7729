"""A wall clock of one process that the harness sets, since nobody may set that of the machine.

A file holds how far it is off, and how often it was read so. The modules of the product have this
clock in place of the module `time`. Libraries read the true one: they compare it with what the
kernel says, and would fail where no clock that was really set makes them fail. Nobody sets the
monotonic clock of a machine, so it is true for all.
"""

import mmap
import struct
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Final

CLOCK_VARIABLE: Final = "CHAOS_CLOCK"
"""File of this process's clock."""
_FORM: Final = struct.Struct("<dQ")
"""Seconds that it is off, and the number of readings while it was off."""
_PRODUCT: Final = "vcpo"


class WallClock:
    """The file of one process's clock: the harness writes the first number, the process the
    other."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_FORM.size))
        with path.open("r+b") as file:
            self._content = mmap.mmap(file.fileno(), _FORM.size)

    @property
    def offset_s(self) -> float:
        return float(_FORM.unpack_from(self._content)[0])

    @property
    def num_readings(self) -> int:
        return int(_FORM.unpack_from(self._content)[1])

    def set_to(self, offset_s: float) -> None:
        struct.pack_into("<d", self._content, 0, offset_s)

    def install(self) -> None:
        """Let the product's modules that are loaded in this process read this clock."""
        clock = ModuleType("time")
        clock.__dict__.update(vars(time))
        clock.__dict__["time"] = self._read
        for name, module in list(sys.modules.items()):
            if name.startswith(_PRODUCT) and vars(module).get("time") is time:
                vars(module)["time"] = clock

    def _read(self) -> float:
        if offset_s := self.offset_s:
            struct.pack_into("<Q", self._content, 8, self.num_readings + 1)
        return time.time() + offset_s
