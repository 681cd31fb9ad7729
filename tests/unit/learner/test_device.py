import pytest
import torch

from vcpo_learner.device import computes, free_bytes, let_segments_grow, to_device

CPU = torch.device("cpu")
GIB = 1 << 30
GPU = torch.device("cuda", 0)


def test_a_cpu_has_no_memory_of_its_own():
    assert free_bytes(CPU) is None


def test_a_device_computes_until_pytorch_raises_an_error(monkeypatch):
    assert computes(CPU)

    def ones_on_a_broken_gpu(*_shape, **_options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "ones", ones_on_a_broken_gpu)
    assert not computes(CPU)


def test_numbers_of_the_cpu_are_on_it_already():
    numbers = torch.arange(3)
    assert to_device(numbers, CPU) is numbers


def test_segments_of_a_gpu_grow_unless_the_user_has_set_up_the_allocator():
    environment: dict[str, str] = {}
    let_segments_grow(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment = {name: "backend:cudaMallocAsync"}
        let_segments_grow(environment)
        assert environment == {name: "backend:cudaMallocAsync"}


@pytest.fixture
def card(monkeypatch):
    """A card of 80 GiB: 70 are free; the process has reserved 6 and allocated 4."""

    def with_share(share):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 6 * GIB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 4 * GIB)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: share)

    return with_share


def test_a_process_alone_on_its_gpu_has_what_the_gpu_has(card):
    card(share=1.0)
    assert free_bytes(GPU) == 72 * GIB  # 70 free, and 2 of its own without a tensor


def test_a_process_that_shares_its_gpu_has_what_its_share_leaves(card):
    card(share=0.5)
    assert free_bytes(GPU) == 36 * GIB  # half of 80, of which it has 4


def test_a_share_that_is_used_up_leaves_nothing(card):
    card(share=0.01)
    assert free_bytes(GPU) == 0
