"""Memory estimates hold what real jobs take; what cannot run is refused, and memory does not grow with blocks."""

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import gptqkit
from gptqkit.empty import open_empty
from gptqkit.errors import ConfigError, DoesNotFitError
from gptqkit.memory import available_ram, estimate
from gptqkit.units import size_text
from support import gguf_files
from support.jobs import processes
from support.models import build, samples

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512}


def llama(dtype, width=256, blocks=1):
    return transformers.LlamaConfig(
        **SIZES, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=blocks, dtype=dtype
    )


def mixtral():
    settings = {**SIZES, "hidden_size": 256, "intermediate_size": 384, "num_local_experts": 8}
    return transformers.MixtralConfig(**settings, num_experts_per_tok=2, num_hidden_layers=1, dtype="bfloat16")


def qwen3_moe():
    """Many experts, whose inputs are wider than they are."""
    settings = {**SIZES, "hidden_size": 256, "moe_intermediate_size": 64, "num_experts": 16}
    return transformers.Qwen3MoeConfig(**settings, num_experts_per_tok=2, num_hidden_layers=1, dtype="float32")


MODELS = {
    "llama": lambda: llama("bfloat16"),
    "float32": lambda: llama("float32"),
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
}

PLAIN = {"grid": "minmax", "refine_rounds": 0}


def save(config, folder):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def status(key):
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def measure(model, out, config, samples, length, how, log):
    """Do a job; write down its estimate, and the RAM and disk that it took at its height.

    RAM is what is neither shared nor mapped from files, beyond that of the program.
    """
    config = gptqkit.QuantizeConfig(**{"quality": "fast", "group_size": 64, "grid": "minmax", **config})
    run = gptqkit.Run(device="cpu", **how)
    tokens = torch.randint(512, (samples, length), generator=torch.Generator().manual_seed(1)) if samples else None
    calibration = gptqkit.Calibration(tokens, samples=max(samples, 1), sequence_length=length)
    estimate = gptqkit.plan(model, out, config, calibration=calibration, run=run)
    before = peak = status("RssAnon")
    disk, done = 0, threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, status("RssAnon"))

    def look(event, _):
        nonlocal disk
        if event == "os.rename":
            files = {file.stat().st_ino: file.stat().st_size for file in out.parent.rglob("*") if file.is_file()}
            disk = max(disk, sum(files.values()))

    sys.addaudithook(look)
    watcher = threading.Thread(target=watch)
    watcher.start()
    gptqkit.quantize(model, calibration if samples else None, out, config, run=run)
    done.set()
    watcher.join()
    found = {"RAM": peak - before, "disk": disk, "output": sum(file.stat().st_size for file in out.iterdir())}
    log.write_text(json.dumps({"found": found, "estimate": estimate.to_dict()}))


def measured(folder, config, *job):
    """What `measure` wrote down of a job on a model, in a process of its own."""
    model, out = save(config, folder / "model"), folder / "job" / "out"
    out.parent.mkdir(parents=True)
    [ended] = processes(measure, model, out, *job, folder / "found", log=folder / "log")
    assert ended.code == 0, ended.text
    return json.loads((folder / "found").read_text())


@linux
@pytest.mark.parametrize(
    ("name", "samples", "length", "config", "how"),
    [
        ("llama", 16, 256, {}, {}),  # its height is a forward pass
        # of two models
        pytest.param("llama", 16, 256, {"quality": "balanced", "learn_iterations": 2}, {}, marks=pytest.mark.slow),
        pytest.param("float32", 8, 32, {"method": "gptaq", "float64": True}, {}, marks=pytest.mark.slow),  # the solver
        ("float32", 8, 32, {"method": "qep", "float64": True, "refine_rounds": 1}, {}),  # the solver's refinement
        # part by part
        pytest.param("float32", 8, 32, {"method": "loaq", "two_sided": True, **PLAIN}, {}, marks=pytest.mark.slow),
        ("qwen3_moe", 8, 64, {"method": "gptaq", **PLAIN}, {}),  # the statistics of all experts
        ("llama", 0, 64, {"method": "rtn"}, {}),
        pytest.param("llama", 16, 256, {"method": "rtn", "tune_epochs": 1}, {}, marks=pytest.mark.slow),
        pytest.param("llama", 16, 64, {"bits": 2, "target_bits": 4.5}, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", 8, 64, {"learn_iterations": 1, "refine_rounds": 0}, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", 8, 64, {"two_sided": True}, {}, marks=pytest.mark.slow),  # what weighs outputs
        pytest.param("mixtral", 8, 64, {"method": "rtn", "tune_epochs": 1}, {}, marks=pytest.mark.slow),
        pytest.param("float32", 0, 64, {"method": "rtn"}, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", 8, 64, {}, {}, marks=pytest.mark.slow),
        pytest.param("llama", 64, 64, {"method": "gptaq"}, {"batch_size": 2}, marks=pytest.mark.slow),
        pytest.param("float32", 256, 64, {}, {"activations": "disk"}, marks=pytest.mark.slow),
    ],
)
def test_estimates_are_good_to_about_a_third(name, samples, length, config, how, tmp_path):
    result = measured(tmp_path, MODELS[name](), config, samples, length, how)
    found, estimate = result["found"], result["estimate"]
    assert 2 / 3 < estimate["needs"]["RAM"]["total"] / found["RAM"] < 4 / 3
    assert found["disk"] / estimate["needs"]["disk"]["total"] < 4 / 3
    assert found["output"] == pytest.approx(estimate["output_bytes"], rel=0.1)


@linux
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "place"), [("float32", "memory"), ("bfloat16", "disk")])
def test_four_times_the_blocks_take_no_more_memory(dtype, place, tmp_path):
    peaks = {}
    for blocks in (4, 16):
        job = ({"true_sequential": False}, 32, 64, {"activations": place})
        peaks[blocks] = measured(tmp_path / str(blocks), llama(dtype, blocks=blocks), *job)["found"]["RAM"]
    block = 4 * 256 * (4 * 256 + 3 * 768)
    assert peaks[16] < peaks[4] + block


def test_hidden_states_that_nothing_resumes_from_do_not_pile_up_on_disk(tmp_path, monkeypatch):
    """While bits are chosen, and sums for an importance matrix made; and they lie beside what is written."""
    build("llama", num_hidden_layers=4).save_pretrained(tmp_path / "model")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    counts = {"choose bits": [], "imatrix": []}

    def look(step):
        if step.stage in counts:
            counts[step.stage].append(len([*tmp_path.rglob("hidden-*.bin")]))

    run, calibration = {"device": "cpu", "activations": "disk"}, gptqkit.Calibration(samples().input_ids)
    config = {"method": "rtn", "group_size": 32, "target_bits": 5.0}
    config["overrides"] = {"self_attn": {"bits": 4}}  # what remains to be chosen is enough
    gptqkit.quantize(tmp_path / "model", calibration, tmp_path / "out", config, run=run, progress=look)
    gptqkit.imatrix(tmp_path / "model", calibration, tmp_path / "imatrix.gguf", run=run, progress=look)
    assert [len(each) for each in counts.values()] == [4, 28]
    assert all(set(each) <= {1, 2} for each in counts.values())


def killed(folder):
    def die(_):
        os.kill(os.getpid(), signal.SIGKILL)

    run, calibration = {"device": "cpu", "activations": "disk"}, gptqkit.Calibration(samples().input_ids)
    config = {"method": "rtn", "group_size": 32, "target_bits": 5.0}
    gptqkit.quantize(folder / "model", calibration, folder / "out", config, run=run, progress=die)


def test_hidden_states_of_a_job_that_was_killed_go_with_the_next(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    [ended] = processes(killed, tmp_path, log=tmp_path / "log")
    assert ended.code == -signal.SIGKILL
    assert list(tmp_path.rglob("hidden-*.bin"))
    config, run = {"method": "rtn", "quality": "fast", "group_size": 32}, {"device": "cpu", "overwrite": True}
    gptqkit.quantize(tmp_path / "model", None, tmp_path / "out", config, run=run)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out", "log-0"}


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (lambda: build("qwen3_moe"), {"bits": 3, "sym": False}),
        (lambda: build("llama"), {"format": "compressed-tensors"}),  # its output layer is the embedding
        (lambda: build("qwen2"), {"lm_head": True, "overrides": {"down_proj": {"bits": 8}, "o_proj": {"skip": True}}}),
        (lambda: gguf_files.build("Mixtral", **gguf_files.NARROW, num_local_experts=4).bfloat16(), {"type": "Q3_K_M"}),
        (lambda: gguf_files.build("Qwen2", tie_word_embeddings=True), {"type": "Q4_K_S"}),
    ],
)
def test_sizes_of_checkpoints_are_known_to_the_byte(make, config, tmp_path):
    gguf_files.save(make(), tmp_path / "model")
    config = {"method": "rtn", "group_size": 128 if "type" in config else 32, **config}
    told = gptqkit.plan(tmp_path / "model", None, config).output_bytes
    gptqkit.quantize(tmp_path / "model", None, tmp_path / "out", config)
    found = gptqkit.inspect(tmp_path / "out")
    assert told == found.packed_bytes + found.other_bytes


# The rest needs no job.


@pytest.fixture
def machine(monkeypatch):
    """A machine of the test's choosing in the place of this one."""

    def choose(ram=1 << 40, gpu=None, disk=1 << 40):
        monkeypatch.setattr("gptqkit.memory.available_ram", lambda: ram)
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=disk))
        monkeypatch.setattr("torch.cuda.device_count", lambda: int(gpu is not None))
        monkeypatch.setattr("torch.cuda.is_available", lambda: gpu is not None)
        monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (gpu, gpu))
        for used in ("memory_reserved", "memory_allocated"):
            monkeypatch.setattr(f"torch.cuda.{used}", lambda _: 0)

    choose()
    return choose


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model without its weights: a plan needs none."""
    place = tmp_path_factory.mktemp("plan")
    llama("bfloat16", blocks=3).save_pretrained(place)
    return place


def plan(folder, device="cpu", method="gptq", **how):
    run = gptqkit.Run(device=device, **how)
    calibration = gptqkit.Calibration(None, samples=128, sequence_length=256)
    return gptqkit.plan(folder, None, gptqkit.QuantizeConfig(method=method), calibration=calibration, run=run)


def test_hidden_states_are_kept_where_they_fit_best(folder, machine):
    states = 128 * 256 * 256 * 2  # samples, tokens, width, bfloat16
    machine(gpu=1 << 40)
    roomy = plan(folder, device="cuda")
    assert roomy.activations == "device"
    assert roomy.needs["GPU memory"]["hidden states"] == states
    assert roomy.needs["RAM"]["hidden states"] == 0
    machine(gpu=roomy.total("GPU memory"))  # no room to spare
    beside = plan(folder, device="cuda")
    assert beside.activations == "memory"
    assert (beside.needs["GPU memory"]["hidden states"], beside.needs["RAM"]["hidden states"]) == (0, states)
    machine(gpu=roomy.total("GPU memory"), ram=2 * states - 2)  # half of the RAM is theirs
    assert plan(folder, device="cuda").activations == "disk"
    machine()
    assert plan(folder).needs["RAM"]["hidden states"] == 2 * states  # float32 on a CPU
    assert plan(folder, method="gptaq").needs["RAM"]["hidden states"] == 4 * states  # and those of the float model
    assert plan(folder, method="rtn").needs["RAM"]["hidden states"] == 16 * 256 * 4  # blocks run on 16 tokens
    machine(ram=4 * states - 2)
    assert plan(folder).activations == "disk"
    assert plan(folder, activations="memory").activations == "memory"  # what was asked for is not changed
    assert plan(folder, activations="device").needs["RAM"]["hidden states"] == 2 * states  # which is the CPU's


def test_processes_share_the_samples_and_the_ram_of_their_machine(folder, machine):
    machine(ram=1 << 30)
    settings = gptqkit.QuantizeConfig(quality="fast"), (128, 256), gptqkit.Run(), torch.device("cpu"), folder
    one, four = (estimate(open_empty(folder), *settings, processes=count) for count in (1, 4))
    assert one.available["RAM"] == 4 * four.available["RAM"] == 1 << 30
    assert one.needs["RAM"]["hidden states"] == 4 * four.needs["RAM"]["hidden states"]
    assert one.needs["disk"] == four.needs["disk"]


def test_sizes_that_are_chosen_are_those_of_the_plan(folder):
    """What a target of bits leaves free has its own; a target of bytes is the checkpoint's size."""

    def size(**config):
        return gptqkit.plan(folder, None, {"group_size": 64, **config}, run={"device": "cpu"}).output_bytes

    assert size(target_bits=3.5, overrides={"proj": {"bits": 8}}) == size(bits=8)
    assert size(bits=3) < size(target_bits=3.7) < size(bits=4)  # of which scales are a quarter of a bit
    assert size(target_size=1 << 21) == 1 << 21


def test_a_plan_refuses_what_the_job_would(folder):
    with pytest.raises(ConfigError, match=r"lies in the other|is the source itself"):
        gptqkit.plan(folder, folder / "out")
    with pytest.raises(ConfigError, match="a path or id is needed, not a list; give a text"):
        gptqkit.plan(folder, [folder])
    with pytest.raises(ConfigError, match="a path or id is needed, not a LlamaConfig; give a text"):
        gptqkit.plan(transformers.LlamaConfig())


def test_a_plan_takes_all_settings_as_dictionaries(folder):
    calibration = {"samples": 128, "sequence_length": 256}
    found = gptqkit.plan(folder, None, {"method": "gptq"}, calibration=calibration, run={"device": "cpu"})
    assert found.needs == plan(folder).needs
    with pytest.raises(ConfigError, match=r"'a\.txt' is not a Calibration; give one, or a dictionary"):
        gptqkit.plan(folder, calibration="a.txt")


def test_what_cannot_run_is_refused_and_what_may_not_is_warned_of(folder, machine, caplog):
    needs = plan(folder)
    needs.check()
    assert not caplog.text
    for name, limits, what, help_text in (
        ("RAM", {"ram": needs.least["RAM"] - 1}, "RAM", "larger machine"),
        ("disk", {"disk": needs.output_bytes - 1}, "disk", "another folder"),
    ):
        machine(**limits)
        there = next(iter(limits.values()))
        refused = plan(folder)
        with pytest.raises(DoesNotFitError) as error:
            refused.check()
        for text in (f"{size_text(needs.least[name])} of {what}", f"there is {size_text(there)}", help_text):
            assert text in str(error.value)
    machine(gpu=1000)
    with pytest.raises(DoesNotFitError, match=r"of GPU memory is the least.*there is 1000 B; use --device cpu"):
        plan(folder, device="cuda").check()
    machine(ram=needs.total("RAM") // 2)
    with caplog.at_level(logging.WARNING, logger="gptqkit"):
        plan(folder, activations="memory").check()
    assert f"{size_text(needs.total('RAM'))} of RAM may be needed" in caplog.text
    assert f"there is {size_text(needs.total('RAM') // 2)}" in caplog.text
    machine(disk=needs.total("disk") - 1)
    caplog.clear()
    plan(folder).check()
    assert "of disk may be needed" in caplog.text
    assert "--activations disk" not in caplog.text
    machine(ram=None, disk=1 << 40)  # what is not known is not refused
    plan(folder).check()


def test_a_job_that_cannot_run_is_refused_before_any_work(tmp_path, machine):
    model = save(llama("bfloat16"), tmp_path / "model")
    steps, run = [], gptqkit.Run(device="cpu", strict=True)
    calibration = gptqkit.Calibration(torch.ones(2, 16, dtype=torch.int64), sequence_length=16)
    for config in ({"group_size": 96}, {"group_size": 96, "target_bits": 3.5}):
        with pytest.raises(ConfigError, match=r"6 Linears with smaller groups, .*; change the settings for these"):
            gptqkit.quantize(model, calibration, tmp_path / "out", config, progress=steps.append, run=run)
    machine(ram=1000)
    for config in ({}, {"target_bits": 3.5}):
        with pytest.raises(DoesNotFitError, match="of RAM is the least that this job needs, and there is 1000 B"):
            gptqkit.quantize(model, calibration, tmp_path / "out", config, progress=steps.append, run=run)
    assert not steps
    assert list(tmp_path.iterdir()) == [model]


def test_available_ram_is_what_the_tightest_control_group_leaves(tmp_path):
    """Cached files are room: the system gives them up first."""

    def write(file, text):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"{text}\n")

    def limit(group, most, used, cached):
        group = f"sys/fs/cgroup{group}/memory"
        for key, text in (("max", most), ("current", used), ("stat", f"anon 500\ninactive_file {cached}")):
            write(f"{group}.{key}", text)

    assert available_ram(tmp_path) is None
    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 5000 kB")
    assert available_ram(tmp_path) == 5000 << 10
    write("proc/self/cgroup", "0::/user/job")
    limit("/user", 1000, 900, 300)
    limit("/user/job", "max", 100, 50)
    assert available_ram(tmp_path) == 400
    limit("/user/job", 200, 100, 50)
    assert available_ram(tmp_path) == 150
    write("proc/self/cgroup", "0::/of/the/host")  # in a container, the mounted group is our own
    limit("", 1000, 1200, 0)
    assert available_ram(tmp_path) == 0
