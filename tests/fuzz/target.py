"""What a fuzz target is: a check that no bytes may fail, and bytes worth trying."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A reader of untrusted bytes."""

    name: str
    check: Callable[[bytes], None]
    """Reads bytes; it raises unless they are refused as documented, or read soundly."""
    inputs: st.SearchStrategy[bytes]
    """Bytes that are almost right."""
    num_short_examples: int = 200
    """Inputs that `make test` draws."""

    @property
    def kept(self) -> list[Path]:
        return sorted((CORPUS / self.name).glob("*"))

    def damaged_inputs(self) -> st.SearchStrategy[bytes]:
        """Inputs, and inputs and kept ones with a few bytes replaced, removed or repeated."""
        kept = [path.read_bytes() for path in self.kept if path.stat().st_size <= 4096]
        whole = self.inputs | st.sampled_from(kept) if kept else self.inputs
        return whole | st.builds(_damaged, whole, st.lists(_DAMAGES, min_size=1, max_size=3))


_DAMAGES = st.tuples(st.integers(0, 4096), st.integers(0, 8), st.binary(max_size=8))


def _damaged(data: bytes, damages: list[tuple[int, int, bytes]]) -> bytes:
    """The bytes after some places have other bytes, fewer or more."""
    for place, num_removed, added in damages:
        at = place % (len(data) + 1)
        data = data[:at] + added + data[at + num_removed :]
    return data
