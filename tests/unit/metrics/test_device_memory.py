"""The memory of a GPU is what PyTorch's allocator says; a CPU has none."""

from types import SimpleNamespace

from vcpo.metrics.device_memory import device_memory
from vcpo.metrics.label_values import MemoryState

ALLOCATOR = SimpleNamespace(
    memory_reserved=lambda device: 30 + device.index,
    max_memory_allocated=lambda device: 20 + device.index,
    get_device_properties=lambda device: SimpleNamespace(total_memory=80 + device.index),
)


def test_a_gpu_has_reserved_peak_and_total_memory():
    gpu = SimpleNamespace(type="cuda", index=1)
    assert device_memory(ALLOCATOR, gpu) == {
        MemoryState.RESERVED: 31,
        MemoryState.PEAK: 21,
        MemoryState.TOTAL: 81,
    }


def test_a_cpu_has_none():
    assert device_memory(ALLOCATOR, SimpleNamespace(type="cpu")) is None
