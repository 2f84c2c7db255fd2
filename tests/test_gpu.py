"""Quantizing and running on a GPU, simulated on every machine and real where there is one."""

import time
from types import SimpleNamespace

import pytest
import torch

import gptqkit
from gptqkit.distributed import Processes
from gptqkit.fisher import measure_fisher
from gptqkit.model import FloatModel
from gptqkit.progress import silent
from gptqkit.walking import own_batches
from support import gguf_files
from support.models import build, samples, save
from support.pipeline import assert_close, dequantized, outputs, quantize

SMALL = samples(4, 16)  # which the simulation needs


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: there @ here,
        lambda here, there: there.index_put((torch.tensor([0], device=here.device),), there[:1]),
        lambda here, there: here.index_put((torch.tensor([0]),), there[:1]),
        lambda here, there: torch.cat([here, there]),
        lambda here, there: torch.mm(here.half().T, there.half(), out_dtype=torch.float32),
        lambda here, there: torch.nn.functional.scaled_dot_product_attention(here[None], there[None], here[None]),
    ],
)
def test_operands_on_two_devices_are_refused(gpu, mix):
    there = torch.ones(8, 8)
    with pytest.raises((RuntimeError, IndexError)):
        mix(there.to(gpu), there)
    mix(there.to(gpu), there.to(gpu))


CASES = [
    ("llama", {"method": "gptq", "lm_head": True, "desc_act": True, "grid": "mse", "refine_rounds": 1}, "memory"),
    ("mixtral", {"method": "loaq", "grid": "sim", "overrides": {r"experts\.[1-3]\.": {"skip": True}}}, "device"),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            ("llama", {"method": "rtn"}, "auto"),
            ("qwen2", {"method": "gptaq", "true_sequential": False}, "disk"),
            ("mixtral", {"method": "gptq"}, "device"),
            ("gpt_oss", {"method": "gptaq"}, "device"),
            ("llama", {"method": "loaq", "grid": "sim"}, "auto"),
            ("llava", {"method": "gptaq"}, "auto"),
            ("bert", {"method": "gptq"}, "auto"),
            ("mamba", {"method": "gptq"}, "disk"),  # adds up in float32, also in bfloat16
            ("t5", {"method": "gptaq"}, "disk"),
        )
    ),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]['method']}")
def on_cpu(request, tmp_path):
    """A model in files, and what it is quantized with and to on the CPU, where nothing is simulated."""
    name, settings, activations = request.param
    settings = {"grid": "minmax", **settings}
    model = build(name, **({"tie_word_embeddings": False} if settings.get("lm_head") else {}))
    save(model.bfloat16(), tmp_path / "model")
    result = quantize(tmp_path / "model", tmp_path / "cpu", SMALL, run={"activations": activations}, **settings)
    return result, settings, activations


def test_what_a_gpu_quantizes_is_as_good_as_on_a_cpu_and_is_what_is_loaded(on_cpu, gpu, tmp_path):
    expected, settings, activations = on_cpu
    run = {"activations": activations, "device": gpu}
    found = quantize(tmp_path / "model", tmp_path / gpu, SMALL, run=run, **settings)
    assert (expected.report.device, found.report.device) == ("cpu", "cuda")
    errors = [{module.name: module.error for module in result.report.modules} for result in (expected, found)]
    assert errors[0].keys() == errors[1].keys()
    assert sum(errors[1].values()) == pytest.approx(sum(errors[0].values()), rel=0.05)
    loaded, _ = gptqkit.load(tmp_path / gpu, device=gpu, backend="torch", dtype="float32")
    assert {tensor.device.type for tensor in loaded.state_dict().values()} == {"cuda"}
    theirs = dequantized(tmp_path / gpu, tmp_path / "model", tmp_path / "dense")
    assert_close(outputs(loaded, SMALL).cpu(), outputs(theirs, SMALL), rtol=1e-3)


def test_the_time_of_a_solver_ends_when_the_gpu_has_done_its_work(gpu, tmp_path, monkeypatch):
    """Which goes on for a while when the last of it was queued."""
    stream = torch.cuda.current_stream()
    busy = SimpleNamespace(cuda_stream=stream.cuda_stream, synchronize=lambda: time.sleep(0.2))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: busy)
    monkeypatch.setattr("gptqkit.kernels.library.find_library", lambda: (None, "it is not asked for"))
    how = {"method": "gptq", "overrides": {"q_proj|k_proj|v_proj|up|gate|down": {"skip": True}}}
    (solved,) = quantize(
        build("llama", num_hidden_layers=1), tmp_path / "out", SMALL, run={"device": gpu}, **how
    ).report.modules
    assert solved.seconds >= 0.2


@pytest.mark.gpu
def test_rounding_is_learned_on_a_gpu_as_well_as_on_a_cpu(tmp_path):
    """Backpropagation cannot be simulated."""
    blocks = {}
    for device in ("cpu", "cuda"):
        how = {"bits": 2, "two_sided": True, "learn_iterations": 30, "run": {"device": device}}
        blocks[device] = quantize(build("llama"), tmp_path / device, samples(64), **how).report.blocks
    for ours, theirs in zip(blocks["cuda"], blocks["cpu"], strict=True):
        assert ours.error < ours.error_before
        assert ours.error == pytest.approx(theirs.error, rel=0.1)


@pytest.mark.gpu
def test_errors_weigh_the_same_on_a_gpu(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    found = []
    for name in ("cpu", "cuda"):
        alone, run, source = (
            Processes(0, 1, torch.device(name)),
            gptqkit.Run(device=name),
            FloatModel(tmp_path / "model"),
        )
        how = own_batches(source, samples(64), alone, run), alone, run, tmp_path / "out", tmp_path, silent
        found.append(measure_fisher(source, *how).metric)
    assert_close(found[1].cpu(), found[0], rtol=0.02)  # chances on the edge between two tokens


@pytest.mark.slow
def test_blocks_of_gguf_are_decided_decoded_and_multiplied_on_a_gpu(gpu, tmp_path):
    gguf_files.save(gguf_files.build(num_hidden_layers=1, intermediate_size=256), tmp_path / "model")
    errors = []
    for device in ("cpu", gpu):
        settings = {"type": "Q2_K", "method": "gptq", "refine_rounds": 1, "group_size": 128, "sym": True}
        settings["overrides"] = {"(q|k|o|gate)_proj": {"skip": True}}
        how = {**settings, "run": {"device": device}}
        result = quantize(tmp_path / "model", tmp_path / device, gguf_files.tokens(4, 16), **how)
        errors.append(sum(module.error for module in result.report.modules))
    assert errors[1] == pytest.approx(errors[0], rel=0.05)
    model, _ = gptqkit.load(tmp_path / gpu, device=gpu, dtype="float32")
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cuda"}
    weight = gptqkit.open_checkpoint(tmp_path / gpu).weight("model.layers.0.mlp.up_proj")
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight.cpu(), weight.dequantize())
    models = [gptqkit.load(tmp_path / gpu, device=gpu, dtype="float16", backend=name)[0] for name in ("auto", "torch")]
    assert models[0].gptqkit_backend.name == "cuda"
    ours, theirs = (outputs(each, gguf_files.tokens(4, 16)).float().cpu() for each in models)
    assert_close(ours, theirs, rtol=1e-2)


@pytest.fixture(scope="module")
def checkpoint(example_model, small_text, tmp_path_factory):
    """A block of the example model at 3 bits, asymmetric, with act-order: everything at once."""
    out = tmp_path_factory.mktemp("example") / "q"
    blocks = {r"layers\.[1-5]\.": {"skip": True}}
    config = gptqkit.QuantizeConfig(method="gptq", bits=3, group_size=64, sym=False, desc_act=True, overrides=blocks)
    source = gptqkit.Calibration([small_text], samples=4, sequence_length=64)
    return gptqkit.quantize(example_model, source, out, config, run=gptqkit.Run(device="cpu")).path


@pytest.mark.parametrize(
    ("batch_size", "dtype", "tolerance"),
    [
        pytest.param(1, "bfloat16", 1e-2, id="fused-bfloat16"),
        pytest.param(8, "float16", 1e-3, id="dense-float16", marks=pytest.mark.slow),
        pytest.param(1, "float16", 1e-3, id="fused-float16", marks=pytest.mark.slow),
        pytest.param(8, "bfloat16", 1e-2, id="dense-bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("length", [16, *(pytest.param(each, marks=pytest.mark.gpu) for each in (48, 512))])
def test_perplexity_is_that_of_the_reference(
    checkpoint, example_model, gpu, small_text, dtype, tolerance, batch_size, length
):
    reference = example_model if dtype == "float16" and batch_size == 8 else None
    scores = {}
    for backend in ("auto", "torch"):
        how = gptqkit.Evaluation(
            sequence_length=length,
            max_windows=batch_size,
            batch_size=batch_size,
            dtype=dtype,
            device=gpu,
            backend=backend,
        )
        scores[backend] = gptqkit.evaluate(checkpoint, [small_text], how, reference=reference)
    assert (scores["auto"].backend, scores["torch"].backend) == ("cuda", "torch")
    assert scores["auto"].perplexity == pytest.approx(scores["torch"].perplexity, rel=tolerance)
    if reference is not None:
        assert scores["auto"].kl_divergence == pytest.approx(scores["torch"].kl_divergence, rel=0.05)


def test_a_loaded_model_generates_what_the_reference_backend_does_and_is_no_larger(checkpoint, gpu):
    found, held = [], []
    for backend in ("torch", "cuda"):
        model, tokenizer = gptqkit.load(checkpoint, device=gpu, backend=backend)
        held.append(sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()))
        prompt = tokenizer("The captain said", return_tensors="pt").to(gpu)
        found.append(model.generate(**prompt, max_new_tokens=3, do_sample=False))
        assert found[-1].shape[1] == prompt.input_ids.shape[1] + 3
    assert torch.equal(*found)
    assert held[1] <= 1.05 * held[0]
