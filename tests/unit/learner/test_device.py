import torch

from vcpo_learner.device import computes, device_memory

CPU = torch.device("cpu")


def test_a_cpu_has_no_memory_of_its_own():
    assert device_memory(CPU) is None


def test_a_device_computes_until_pytorch_raises_an_error(monkeypatch):
    assert computes(CPU)

    def ones_on_a_broken_gpu(*_shape, **_options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "ones", ones_on_a_broken_gpu)
    assert not computes(CPU)
