"""The layer of the cuda backend: what it keeps, what it refuses, how it is chosen."""

import dataclasses
import gc

import pytest
import torch

from gptqkit.errors import BackendError
from gptqkit.kernels import backend
from gptqkit.kernels.backend import choose_backend, make_linear, summarize
from gptqkit.kernels.cuda_backend import CudaLinear
from gptqkit.kernels.library import Search
from gptqkit.kernels.torch_backend import TorchLinear
from support.emulation import EmulatedLinear, move

SHUFFLED = torch.randperm(256, generator=torch.Generator().manual_seed(3)) // 128


class PretendLinear(CudaLinear):
    """Takes the CPU for a GPU that lacks the library."""

    device_type = "cpu"

    @classmethod
    def refusal(cls, packed, dtype):  # noqa: ARG003
        return "the kernels are not built"


def buffer_bytes(module):
    return sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 128])
@pytest.mark.parametrize("act_order", [False, True], ids=["", "act_order"])
@pytest.mark.usefixtures("emulation")
def test_memory_is_that_of_the_packed_layer(make_layer, bits, group_size, act_order):
    g_idx = torch.randperm(256, generator=torch.Generator().manual_seed(3)) // group_size if act_order else None
    packed = make_layer(bits=bits, rows=256, columns=256, group_size=group_size, g_idx=g_idx, bias=True).packed
    tensors = [packed.qweight, packed.qzeros, packed.scales, packed.bias, *([packed.g_idx] if packed.act_order else [])]
    stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    linear = EmulatedLinear(packed, torch.float16)
    # Zeros of 8 bits take 16, so that 256 is one: 160 bits for 152 in groups of 16.
    assert abs(buffer_bytes(linear) / stored - 1) <= (0.053 if (bits, group_size) == (8, 16) else 0.05)
    assert list(linear.parameters()) == []


@pytest.mark.usefixtures("emulation")
def test_words_of_the_checkpoint_are_freed(make_layer):
    layer = make_layer()
    linear = EmulatedLinear(layer.packed, torch.float16)
    words = layer.packed.qweight
    del layer
    gc.collect()
    kept = {buffer.untyped_storage().data_ptr() for buffer in linear.buffers()}
    assert words.untyped_storage().data_ptr() not in kept


@pytest.mark.usefixtures("emulation")
def test_layer_agrees_with_the_torch_backend(make_layer):
    packed = make_layer(bits=3, rows=96, columns=256, group_size=128, g_idx=SHUFFLED, bias=True).packed
    linear, reference = EmulatedLinear(packed, torch.float16), TorchLinear(packed, torch.float16)
    for tokens in (1, 40, 150):
        x = torch.randn(2, tokens, 256).half()
        assert torch.allclose(linear(x).float(), reference(x).float(), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("emulation")
def test_changing_the_dtype_does_not_round_the_scales(make_layer):
    packed = make_layer(bias=True).packed
    linear, other = (EmulatedLinear(packed, dtype) for dtype in (torch.float16, torch.bfloat16))
    x = torch.randn(3, 96).bfloat16()
    linear.to(torch.bfloat16)
    assert linear.scale.dtype == torch.float16
    assert torch.equal(linear(x), other(x))


@pytest.mark.usefixtures("emulation")
def test_state_survives_saving(make_layer):
    first = EmulatedLinear(make_layer(seed=1, bias=True).packed, torch.float16)
    second = EmulatedLinear(make_layer(seed=2, bias=True).packed, torch.float16)
    x = torch.randn(3, 96).half()
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))


def test_an_explicit_choice_on_a_cpu_says_why_not(make_layer):
    with pytest.raises(BackendError, match=r"'cuda' cannot serve layer: .*NVIDIA GPUs only, and the layer is on cpu"):
        choose_backend("cuda", make_layer().packed, torch.float16)


def test_the_automatic_choice_on_a_cpu_does_not_look_for_kernels(make_layer, monkeypatch):
    def fail():
        raise AssertionError

    monkeypatch.setattr("gptqkit.kernels.cuda_backend.find_library", fail)
    choice = choose_backend("auto", make_layer().packed, torch.float16)
    assert choice.name == "cpu"
    assert not choice.fallback
    assert "cuda" not in choice.reason


def test_a_fallback_is_marked_and_explained(make_layer, monkeypatch):
    monkeypatch.setattr(backend, "AUTOMATIC", (PretendLinear, TorchLinear))
    choice = choose_backend("auto", make_layer().packed, torch.float16)
    assert choice.name == "torch"
    assert choice.fallback
    assert "not cuda, because the kernels are not built" in choice.reason
    plain = dataclasses.replace(choice, fallback=False)
    assert summarize([plain, choice]).fallback
    assert not summarize([plain]).fallback


@pytest.mark.gpu
def test_refusals_on_a_gpu(make_layer, monkeypatch):
    packed = move(make_layer().packed, "cuda")
    with pytest.raises(BackendError, match="load with such a dtype"):
        choose_backend("cuda", packed, torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr("gptqkit.kernels.cuda_backend.OLDEST_CAPABILITY", (99, 0))
        with pytest.raises(BackendError, match="compute capability"):
            choose_backend("cuda", packed, torch.float16)
    monkeypatch.setattr("gptqkit.kernels.cuda_backend.find_library", lambda: Search(library=None, reason="no nvcc"))
    with pytest.raises(BackendError, match="no nvcc"):
        choose_backend("cuda", packed, torch.float16)
    assert "not cuda, because no nvcc" in choose_backend("auto", packed, torch.float16).reason


@pytest.mark.gpu
def test_automatic_choice_on_a_gpu(make_layer):
    packed = move(make_layer().packed, "cuda")
    choice = choose_backend("auto", packed, torch.float16)
    assert choice.name == "cuda"
    assert "chosen automatically" in choice.reason
    assert isinstance(make_linear(choice, packed, torch.float16), CudaLinear)
