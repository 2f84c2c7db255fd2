"""Runs are planned before they start: from files alone, by the machine there is, and for all ranks alike."""

import dataclasses
import logging
import shutil

import pytest
import torch

import gptqkit
from gptqkit import pace, planning
from gptqkit.budget import Plan, make_plan
from gptqkit.errors import CheckpointError, ConfigError, DatasetUnavailableError, DoesNotFitError
from gptqkit.export.work import work_path
from gptqkit.machine import Machine
from gptqkit.pace import Pace, measure_pace
from gptqkit.quantizer.ranks import Ranks
from gptqkit.sizes import BlockSizes, Sizes, measure
from gptqkit.source import StoredModel
from gptqkit.workload import Workload
from support.models import MIXTURES, build, save, windows

CPU = torch.device("cpu")
ROOMY = Machine(memory=1 << 40, program=0, gpu=None, disk=1 << 40)
CONFIG = gptqkit.QuantizeConfig(group_size=32)


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    save(build("mistral"), model)
    return model


@pytest.fixture
def machine(monkeypatch):
    """A machine of the test's choosing in the place of this one: `machine(memory=...)`."""

    def choose(**limits):
        monkeypatch.setattr(planning, "look", lambda *_, **__: dataclasses.replace(ROOMY, **limits))

    choose()
    return choose


def test_a_plan_needs_the_config_and_no_weights(folder, tmp_path):
    without = tmp_path / "without"
    without.mkdir()
    shutil.copy(folder / "config.json", without)
    made = gptqkit.plan(without, config=CONFIG, samples=16, timed=False)
    assert made.sizes == gptqkit.plan(folder, config=CONFIG, samples=16, timed=False).sizes
    assert made.workload.sequence_length == 64  # all positions
    assert made.seconds is None
    made.check()


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_planned_as_they_are_calibrated(name, tmp_path):
    save(build(name), tmp_path)
    made = gptqkit.plan(tmp_path, config=CONFIG, samples=6, sequence_length=24, timed=False)
    assert made.untraced == []
    result = gptqkit.quantize(build(name), windows().input_ids, None, CONFIG, sequence_length=24)
    layers = {module.layer for module in result.report.modules}
    assert sum(kind.count for kind in made.sizes.blocks) == len(layers)


def test_what_cannot_be_planned_is_said(folder, tmp_path):
    with pytest.raises(DatasetUnavailableError):
        gptqkit.plan(tmp_path / "missing")
    with pytest.raises(ConfigError, match="64 positions"):
        gptqkit.plan(folder, sequence_length=65)
    with pytest.raises(ConfigError, match="group_size 48"):
        gptqkit.plan(folder, config=gptqkit.QuantizeConfig(group_size=48))
    gptqkit.quantize(folder, None, tmp_path / "out", gptqkit.QuantizeConfig(method="rtn", group_size=32))
    with pytest.raises(CheckpointError, match="quantized already"):
        gptqkit.plan(tmp_path / "out")


@pytest.mark.parametrize("error", [RuntimeError, ValueError, IndexError, ZeroDivisionError])
def test_a_forward_pass_that_cannot_be_traced_is_estimated_and_said(error, monkeypatch):
    def fail(*_):
        raise error("shapes depend on numbers")

    model = build("mistral")
    exact = measure(gptqkit.sizes.shapes_of(model), Workload(config=CONFIG, sequence_length=24, device=CPU))
    monkeypatch.setattr("gptqkit.quantizer.stream.BlockStream.trace", fail)
    guessed = measure(gptqkit.sizes.shapes_of(model), Workload(config=CONFIG, sequence_length=24, device=CPU))
    assert not guessed.blocks[0].traced
    coarse, fine = (
        [max(getattr(phase, kind) for phase in sizes.blocks[0].phases) for kind in ("sample", "fixed", "statistics")]
        for sizes in (guessed, exact)
    )
    assert all(rough >= right > 0 for rough, right in zip(coarse, fine, strict=True))
    made = make_plan(lambda _: guessed, Workload(config=CONFIG, sequence_length=24, device=CPU), ROOMY)
    assert made.untraced == ["model.layers.0"]


def test_a_run_that_does_not_fit_is_refused_before_any_work(folder, tmp_path, machine):
    machine(memory=100_000)
    worked = []
    with pytest.raises(
        DoesNotFitError, match=r"of RAM needed.*fit_check=False \(--no-fit-check\) goes on all the same"
    ):
        gptqkit.quantize(
            folder, windows().input_ids, tmp_path / "out", CONFIG, sequence_length=24, progress=worked.append
        )
    assert not worked
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_refusal_can_be_overridden(folder, tmp_path, machine, caplog):
    machine(memory=100_000)
    with caplog.at_level(logging.WARNING, logger="gptqkit"):
        result = gptqkit.quantize(
            folder, windows().input_ids, tmp_path / "out", CONFIG, sequence_length=24, fit_check=False
        )
    assert "the run does not fit" in caplog.text
    assert result.report.batch_size == 1  # the most modest choice
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_coarse_estimate_warns_and_does_not_refuse(folder, machine, monkeypatch, caplog):
    machine(memory=100_000)
    monkeypatch.setattr("gptqkit.rehearsal.dry_run", lambda **_: (_ for _ in ()).throw(RuntimeError("no meta kernel")))
    with caplog.at_level(logging.WARNING, logger="gptqkit"):
        gptqkit.quantize(folder, windows().input_ids, None, CONFIG, sequence_length=24)
    assert "by a coarse estimate, the run does not fit" in caplog.text


def test_a_small_machine_gives_the_same_result_with_smaller_means(folder, tmp_path, machine):
    asked = {"config": CONFIG, "samples": 6, "sequence_length": 48}
    needed = gptqkit.plan(folder, **asked, batch_size=6, activations="disk", timed=False).needs["RAM"].total
    results = {}
    for name, limits, options in (
        ("roomy", {}, {"batch_size": 1}),
        ("tight", {"memory": needed - 1}, {}),
        ("disk", {}, {"activation_memory": 0, "batch_size": 1}),
    ):
        machine(**limits)
        results[name] = gptqkit.quantize(folder, windows(6, 48).input_ids, tmp_path / name, **asked, **options)
    assert results["tight"].report.batch_size < 6
    for name, result in results.items():
        for module, weight in result.weights.items():
            expected = results["roomy"].weights[module]
            if name == "disk":  # another place, the same batches: the same bits
                assert torch.equal(weight.codes, expected.codes)
            assert (weight.codes != expected.codes).float().mean() < 0.02


def test_a_resumed_job_keeps_its_batches_whatever_the_memory(folder, tmp_path, machine):
    asked = {"config": CONFIG, "samples": 6, "sequence_length": 48}
    gptqkit.quantize(folder, windows(6, 48).input_ids, tmp_path / "whole", **asked)

    def stop(step):
        if step.layer == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gptqkit.quantize(folder, windows(6, 48).input_ids, tmp_path / "out", **asked, progress=stop)
    assert work_path(tmp_path / "out").exists()
    needed = gptqkit.plan(folder, **asked, batch_size=6, activations="disk", timed=False).needs["RAM"].total
    machine(memory=needed - 1)
    with pytest.raises(DoesNotFitError, match=r"forward pass of 6 samples\. No option makes it fit"):
        gptqkit.quantize(folder, windows(6, 48).input_ids, tmp_path / "out", **asked, resume=True)
    machine()
    gptqkit.quantize(folder, windows(6, 48).input_ids, tmp_path / "out", **asked, resume=True)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_ranks_follow_the_plan_of_the_one_with_the_least_room(machine, monkeypatch):
    model = build("mistral")
    asked = Workload(config=CONFIG, sequence_length=24, device=CPU, samples=16)
    roomy = planning.plan_run(model, asked, Ranks.alone(), None)
    assert roomy.workload.batch_size == 8
    machine(memory=roomy.needs["RAM"].total - 1)
    tight = planning.plan_run(model, asked, Ranks.alone(), None)
    assert tight.workload.batch_size < 8 or tight.workload.activations == "disk"
    machine()
    gather = Ranks.gather
    monkeypatch.setattr(Ranks, "gather", lambda self, value: gather(self, value) + [tight] * isinstance(value, Plan))
    assert planning.plan_run(model, asked, Ranks.alone(), None) == tight


def kind(count, weights):
    return BlockSizes(
        name="layers",
        count=count,
        weights=weights,
        phases=(),
        results=0,
        traced=True,
    )


def test_the_estimate_follows_weights_and_tokens():
    sizes = Sizes(layers=5, blocks=(kind(3, 100), kind(2, 400)), outside=0, state=0, output=0, source=0)
    workload = Workload(config=CONFIG, sequence_length=10, device=CPU, samples=7)
    speed = Pace(outside=2.0, block=5.0, token=0.5)
    assert speed.total(sizes, workload) == pytest.approx(2 + (3 + 2 * 4) * (5 + 70 * 0.5))
    assert speed.total(sizes, dataclasses.replace(workload, samples=0)) == pytest.approx(2 + 11 * 5)


@pytest.mark.parametrize("token", [1e-6, 1e-3, 1e-1])
def test_passes_and_solving_are_told_apart(token, monkeypatch):
    """A clock in the place of the walk: 0.3 s of reading, 2 s of solving, 0.5 s beside it, and `token` per token."""

    class Watch:
        outside_read, read, solved = 7.0, 0.3, 2.0

        def __init__(self, shape):
            self.worked = 2.5 + shape[0] * shape[1] * token

    monkeypatch.setattr(pace, "_time", lambda _, __, shape: Watch(shape))
    found = measure_pace(None, Workload(config=CONFIG, sequence_length=2048, device=CPU))
    assert found.token == pytest.approx(token)
    assert (found.outside, found.block) == (7.0, pytest.approx(2.8))


@pytest.mark.parametrize("calibrated", [True, False])
def test_timing_works_on_one_block_only(folder, monkeypatch, calibrated):
    source = StoredModel(folder)
    read = []
    block = source.block
    monkeypatch.setattr(source, "block", lambda layer, *rest: read.append(layer) or block(layer, *rest))
    config = CONFIG if calibrated else gptqkit.QuantizeConfig(group_size=32, method="rtn")
    workload = Workload(config=config, sequence_length=64, device=CPU, samples=2 if calibrated else 0, batch_size=2)
    found = measure_pace(source, workload)
    assert set(read) == {0}
    assert found.block > 0
    assert found.token >= 0 if calibrated else found.token == 0
    assert all(tensor.is_meta for tensor in source.model.parameters())
