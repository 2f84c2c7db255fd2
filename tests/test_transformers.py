"""Checkpoints in the hands of transformers: `save_pretrained`, `from_pretrained`, and programs built on them."""

import copy
import gc
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import gptqkit
from gptqkit.errors import BackendError, CheckpointError, ConfigError, DatasetUnavailableError
from gptqkit.export.checkpoint import open_checkpoint
from gptqkit.kernels.linear import QuantLinear, TorchLinear
from support.jobs import contents
from support.models import build, samples, save
from support.pipeline import outputs, quantize

SKIP = gptqkit.ModuleOverride(skip=True)
MIXED = {"down_proj": gptqkit.ModuleOverride(bits=3, group_size=-1), r"1\.self_attn\.o_proj": SKIP}
CASES = {  # model, settings
    "v1, tied": ("llama", {"format": "gptq", "sym": True}),
    "act-order": ("mistral", {"desc_act": True}),
    "3 bits, head": ("qwen2", {"bits": 3, "lm_head": True, "method": "rtn"}),
    "transposed": ("gpt2", {"method": "rtn", "format": "gptq"}),
    "experts": ("mixtral", {"method": "rtn"}),
    "experts, some float": ("gpt_oss", {"method": "rtn", "overrides": {r"experts\.1\.": SKIP}}),
    "encoder": ("bert", {"method": "rtn"}),
    "awq, tied": ("llama", {"method": "rtn", "format": "awq", "overrides": {r"1\.mlp": SKIP}}),
    "compressed, mixed": (
        "qwen2",
        {"format": "compressed-tensors", "overrides": MIXED, "lm_head": True, "desc_act": True},
    ),
    "compressed, experts": (
        "mixtral",
        {"method": "rtn", "format": "compressed-tensors", "overrides": {r"ts\.1": SKIP}},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def checkpoints(folder):
    """The checkpoint of a case: models in float16, which `load` takes to float32 on a CPU."""

    def make(case):
        out, (name, settings) = folder / case, CASES[case]
        if not out.exists():
            save(build(name).half(), folder / f"{case} float")
            quantize(folder / f"{case} float", out, **settings)
        return out

    return make


@pytest.fixture
def checkpoint(checkpoints, tmp_path):
    """One to change."""
    return shutil.copytree(checkpoints("act-order"), tmp_path / "q")


def load(path, **settings):
    return gptqkit.load(path, device="cpu", **settings)[0]


def read(file):
    return json.loads(file.read_text())


def stored(path):
    """All tensors of a folder, read without our code."""
    return {name: each for file in path.glob("*.safetensors") for name, each in load_file(file).items()}


def assert_same_tensors(path, other):
    found, wanted = stored(path), stored(other)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


SLOW = ("3 bits, head", "experts, some float", "encoder", "compressed, experts")


@pytest.mark.parametrize("case", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in CASES])
def test_a_loaded_model_is_saved_as_it_was(case, checkpoints, tmp_path):
    path = checkpoints(case)
    model = load(path, backend="torch" if case == "act-order" else "auto")
    model.save_pretrained(tmp_path / "again")
    names = {"config.json", "quantize_config.json", "model.safetensors"}
    assert contents(tmp_path / "again").keys() - {"generation_config.json"} == names
    assert_same_tensors(tmp_path / "again", path)
    config = read(tmp_path / "again" / "config.json")
    assert config == read(path / "config.json")
    assert config["dtype"] == "float16"
    assert torch.equal(outputs(load(tmp_path / "again")), outputs(model))


def test_into_its_own_folder_only_configs_are_written(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    config = read(checkpoint / "config.json")
    config["quantization_config"]["model_file_base_name"] = "other"
    (checkpoint / "config.json").write_text(json.dumps(config))
    save_file({}, checkpoint / "adapter.safetensors")
    model = load(checkpoint)
    before = contents(checkpoint)
    model.config.use_cache = False
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(str(checkpoint), max_shard_size="20KB", safe_serialization=True)
    after = contents(checkpoint)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"config.json", "generation_config.json", "quantize_config.json"}
    assert read(checkpoint / "config.json")["quantization_config"] == config["quantization_config"]
    assert read(checkpoint / "quantize_config.json") == config["quantization_config"]
    again = load(checkpoint)
    assert (again.config.use_cache, again.generation_config.max_new_tokens) == (False, 7)
    assert torch.equal(outputs(again), outputs(model))


def stopped(monkeypatch, step, work):
    """Do work that Ctrl-C stops before so many files were moved or deleted; whether it came to that."""
    steps = iter(range(1, step))

    def counted(operate):
        def run(self, *arguments, **named):
            if not self.name.startswith(".part") and next(steps, None) is None:
                raise KeyboardInterrupt
            return operate(self, *arguments, **named)

        return run

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        try:
            work()
        except KeyboardInterrupt:
            return True
    return False


def assert_whole(path, like):
    """What is read, by index or without, is all there and as it was."""
    tensors, wanted = open_checkpoint(path).tensors, stored(like)
    assert tensors.where.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensors.get(name), tensor), name


def test_stopped_at_any_moment_its_own_folder_is_whole(checkpoint, checkpoints, tmp_path, monkeypatch):
    more, step = True, 0
    while more:
        step += 1
        folder = shutil.copytree(checkpoint, tmp_path / str(step))
        model = load(folder)
        more = stopped(monkeypatch, step, partial(model.save_pretrained, folder))
        assert_whole(folder, checkpoints("act-order"))
        (folder / ".model.gptqkit-incomplete-0123abcd").mkdir()
        model.save_pretrained(folder)
        assert_whole(folder, checkpoints("act-order"))
        assert not list(folder.glob(".*"))
    assert step > 3


def test_stopped_at_any_moment_another_folder_is_refused(checkpoint, tmp_path, monkeypatch):
    model = load(checkpoint)
    shutil.copytree(checkpoint, tmp_path / "old")
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.qweight"][0, 0] ^= 1
    save_file(tensors, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    changed = load(tmp_path / "old")
    changed.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    more, step = True, 0
    while more:
        step += 1
        folder = shutil.copytree(tmp_path / "shards", tmp_path / str(step))
        more = stopped(monkeypatch, step, partial(model.save_pretrained, folder, max_shard_size="32KB"))
        if more and step > 1:  # else it is the old one, or the new one
            with pytest.raises(CheckpointError, match=r"config\.json is missing"):
                load(folder)
        model.save_pretrained(folder)
        assert_whole(folder, checkpoint)
    assert step > 6


def scale_norm(model):
    model.model.norm.weight.data *= 1.5


def scale_layer(model):
    model.model.layers[0].mlp.up_proj.dense.mul_(2)


def replace_layer(model):
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 96, bias=False)


def drop_block(model):
    del model.model.layers[1]


def grow(model):
    model.resize_token_embeddings(100)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (scale_norm, r"model\.norm\.weight;"),
        (scale_layer, r"model\.layers\.0\.mlp\.up_proj\.dense;"),
        (replace_layer, r"model\.layers\.0\.mlp\.up_proj, model\.layers\.0\.mlp\.up_proj\.weight;"),
        (drop_block, r"model\.layers\.1\.mlp\.down_proj, .* and 5 more;"),
        (grow, r"model\.embed_tokens\.weight, lm_head\.weight;"),
    ],
)
def test_a_changed_model_is_not_saved(change, name, checkpoint, tmp_path):
    model = load(checkpoint)
    change(model)
    with pytest.raises(CheckpointError, match=f"the model differs from .*, in {name} a quantized"):
        model.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_model_whose_files_changed_is_not_saved(checkpoint, tmp_path):
    model = load(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.qweight"][0, 0] ^= 1
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"in model\.layers\.1\.mlp\.down_proj\.dense;"):
        model.save_pretrained(tmp_path / "again")
    shutil.rmtree(checkpoint)
    with pytest.raises(DatasetUnavailableError, match="there is no folder"):
        model.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_options_of_save_pretrained(checkpoint, tmp_path):
    model = load(checkpoint)
    for name, value in {"push_to_hub": True, "variant": "fp16", "state_dict": {}, "no_such": 1}.items():
        with pytest.raises(ConfigError, match=f"does not take {name}="):
            model.save_pretrained(tmp_path / "again", **{name: value})
    with pytest.raises(ConfigError, match="max_shard_size: 'small' is no size"):
        model.save_pretrained(tmp_path / "again", max_shard_size="small")
    model.save_pretrained(tmp_path / "again", is_main_process=False, push_to_hub=False)
    assert not (tmp_path / "again").exists()


def test_copies_and_casts_are_saved_and_no_model_is_kept_alive(checkpoint, tmp_path):
    model = load(checkpoint).bfloat16()
    copies = {"deep": copy.deepcopy(model), "pickled": pickle.loads(pickle.dumps(model))}
    gone = weakref.ref(model)
    gc.disable()
    del model
    gc.enable()
    assert gone() is None
    with pytest.raises(ConfigError, match="nothing holds the model any more"):
        load(checkpoint).save_pretrained(tmp_path / "again")
    for name, each in copies.items():
        each.save_pretrained(tmp_path / name)
        assert_same_tensors(tmp_path / name, checkpoint)
    scale_norm(copies["deep"])
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        copies["deep"].save_pretrained(tmp_path / "again")
    copies["pickled"].save_pretrained(tmp_path / "again")


def test_on_a_gpu(gpu, checkpoint, tmp_path):
    model = gptqkit.load(checkpoint, device=gpu, dtype="float16")[0]
    for device in (gpu, 0, "auto"):
        theirs = AutoModelForCausalLM.from_pretrained(checkpoint, device_map=device)
        assert theirs.gptqkit_backend.name == "cuda"
        assert theirs.device == model.device
        assert torch.equal(outputs(theirs), outputs(model))
    model.save_pretrained(tmp_path / "again")
    assert_same_tensors(tmp_path / "again", checkpoint)


USER = """
import sys
{first}
from transformers import AutoModel, AutoModelForCausalLM
import torch
ids, *rest = sys.argv[1:]
for path in rest:
    kind = AutoModel if "encoder" in path else AutoModelForCausalLM
    {before}
    model = kind.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        torch.save(model(torch.load(ids))[0], path + ".pt")
"""
LATE = """
    try:
        kind.from_pretrained(path)
    except ImportError as error:
        assert "optimum" in str(error)
    else:
        raise AssertionError("transformers needs nobody")
    import gptqkit
"""


@pytest.mark.parametrize(
    ("first", "before", "cases"),
    [
        pytest.param("import gptqkit", "", [*CASES], id="imported before transformers"),
        pytest.param("", LATE, ["experts"], id="after", marks=pytest.mark.slow),
    ],
)
def test_from_pretrained_in_a_users_script(first, before, cases, checkpoints, tmp_path):
    tokens = samples()
    torch.save(tokens.input_ids, tmp_path / "ids.pt")
    paths = {case: shutil.copytree(checkpoints(case), tmp_path / case) for case in cases}
    script = USER.format(first=first, before=before)
    run(sys.executable, "-c", script, tmp_path / "ids.pt", *paths.values())
    for case, path in paths.items():
        expected = outputs(load(path), tokens)
        assert torch.equal(torch.load(tmp_path / f"{case}.pt"), expected), case


def run(*command):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_what_from_pretrained_returns(checkpoint, tmp_path):
    ours = load(checkpoint)
    model, found = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, device_map="cpu", output_loading_info=True
    )
    assert not any(found.values())
    assert type(model) is type(ours)
    assert model.state_dict().keys() == ours.state_dict().keys()
    assert not model.training
    assert model.config is model.model.config
    assert model.generation_config.to_dict() == ours.generation_config.to_dict()
    assert model.gptqkit_backend.name == "cpu"
    prompt = samples(1).input_ids
    both = [each.generate(prompt, max_new_tokens=5, do_sample=False) for each in (model, ours)]
    assert torch.equal(*both)
    half = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert half.dtype == torch.float16
    assert torch.equal(outputs(half), outputs(load(checkpoint, dtype="float16")))
    half.save_pretrained(tmp_path / "again")
    assert read(tmp_path / "again" / "config.json") == read(checkpoint / "config.json")
    assert_same_tensors(tmp_path / "again", checkpoint)


@pytest.mark.parametrize("case", ["act-order", "3 bits, head", "experts, some float"])
def test_a_class_without_the_head(case, checkpoints):
    path = checkpoints(case)
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    assert any(isinstance(module, QuantLinear) for module in model.modules())
    with torch.no_grad():
        expected = load(path).base_model(samples().input_ids).last_hidden_state
    assert torch.equal(outputs(model), expected)


def test_requests_that_from_pretrained_refuses(checkpoint):
    kind = AutoModelForCausalLM
    with pytest.raises(ConfigError, match="runs a model on one device"):
        kind.from_pretrained(checkpoint, device_map={"model": "cpu", "lm_head": "cpu"})
    with pytest.raises(ConfigError, match="leave out state_dict"):
        transformers.MistralForCausalLM.from_pretrained(
            None, config=transformers.AutoConfig.from_pretrained(checkpoint), state_dict={}
        )
    with pytest.raises(
        CheckpointError, match=r"lacks score\.weight, which MistralFor.* has; open it as .* a MistralForCausalLM"
    ):
        transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"), pytest.raises(BackendError):
        kind.from_pretrained(checkpoint, quantization_config=transformers.GPTQConfig(4, backend="marlin"))
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        asked = kind.from_pretrained(checkpoint, quantization_config=transformers.GPTQConfig(4, backend="torch"))
    assert isinstance(asked.model.layers[0].mlp.up_proj, TorchLinear)
    with pytest.raises(ValueError, match="not serializable"):
        transformers.PreTrainedModel.save_pretrained(asked, checkpoint)
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "model.fp16.safetensors")
    with pytest.raises(CheckpointError, match="do not ask for a variant"):
        kind.from_pretrained(checkpoint, variant="fp16")


def test_transformers_quantizes_float_models_as_ever_and_reads_what_we_do_not(checkpoints, folder, tmp_path):
    for case, wanted in (("awq, tied", "gptqmodel"), ("compressed, experts", "compressed-tensors")):
        path = shutil.copytree(checkpoints(case), tmp_path / case)
        config = read(path / "config.json")
        config["quantization_config"] |= {"format": "int-quantized", "version": "gemv"}
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ImportError, match=wanted):
            AutoModelForCausalLM.from_pretrained(path)
    checkpoints("act-order")
    with pytest.raises(ImportError, match="optimum"):
        AutoModelForCausalLM.from_pretrained(
            folder / "act-order float", quantization_config=transformers.GPTQConfig(4, dataset=["text"])
        )


@pytest.mark.slow
def test_lm_eval_measures_a_checkpoint(root, example_model, example_data, tokenizer, tmp_path):
    """With the command of the README, a model and a text on this machine: the perplexity that its logits give."""
    pytest.importorskip("lm_eval")
    text = (example_data / "heldout.txt").read_text(encoding="utf-8")[:1200]
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    task = {
        "task": "local_text",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "text.jsonl")}},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (tmp_path / "local.yaml").write_text(json.dumps(task))
    config, how = gptqkit.QuantizeConfig(method="rtn", bits=3), gptqkit.Run(device="cpu")
    out = gptqkit.quantize(example_model, None, tmp_path / "OUT", config, run=how).path
    readme = (root / "README.md").read_text(encoding="utf-8")
    [command] = [line.strip() for line in readme.splitlines() if "lm_eval.__main__" in line]
    code = command.split('"')[1]
    options = f"--model hf --model_args pretrained={out} --tasks local_text --include_path {tmp_path} --device cpu"
    assert "--model hf --model_args pretrained=out-dir" in command
    run(sys.executable, "-c", code, *options.split(), "--output_path", tmp_path / "results")
    [file] = (tmp_path / "results").rglob("results_*.json")
    measured = json.loads(file.read_text())["results"]["local_text"]["bits_per_byte,none"]
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text).input_ids]])
    assert ids.shape[1] <= 512
    with torch.no_grad():
        logits = load(out)(ids).logits[0, :-1].double()
    nats = float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    assert measured == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-3)
