"""Number formats that this machine's CPU computes slowly.

PyTorch has oneDNN multiply matrices of bfloat16 where the CPU has AVX-512, or AVX with conversions
(`torch.ops.mkldnn._is_mkldnn_bf16_supported`). Elsewhere its own loops do: with AVX2 alone a
product takes 3 to 45 times as long as in float32, by the order of its factors
(`examples/demo_real.py` times one).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from vcpo.api import GpuUse, VCPORunSpec
from vcpo.api.workloads import Precision

_CPU_FILE: Final = Path("/proc/cpuinfo")
_FLAGS: Final = re.compile(r"^flags\s*:(.*)$", re.MULTILINE)
"""Of an x86 CPU; others have no such line."""
_ENOUGH: Final = frozenset({"avx512bw", "avx_ne_convert"})


def cpu_flags(file: Path = _CPU_FILE) -> frozenset[str] | None:
    """Return the instruction sets of this machine's CPU as Linux names them; None if unknown."""
    with suppress(OSError):
        if found := _FLAGS.search(file.read_text(encoding="utf-8")):
            return frozenset(found[1].split())
    return None


def cpu_warnings(
    spec: VCPORunSpec, uses: Sequence[GpuUse], flags: frozenset[str] | None
) -> Iterator[str]:
    """Yield which parts compute in bfloat16 on a CPU that is slow at it, in sentences with a cure.

    uses: of the machines that the run may be for; a part that has a GPU on one of them is left out.
    """
    if flags is None or flags & _ENOUGH:
        return
    told = "'bfloat16' takes several times as long as 'float32' on this CPU, which lacks"
    cure = f"{told} AVX-512; remove the field"
    if spec.learner.precision is Precision.BFLOAT16 and not any(use.learner for use in uses):
        yield f"spec.learner.precision: {cure}"
    for index, group in enumerate(spec.rollouts):
        on_gpu = any(group.name in use.groups for use in uses)
        if group.precision is Precision.BFLOAT16 and not on_gpu:
            yield f"spec.rollouts[{index}].precision: {cure}"
