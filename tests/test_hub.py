"""Models and tokenizers by name: ids of a Hub that is replaced, folders, and names that are neither."""

import shlex
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

import gptqkit
from gptqkit import cli
from gptqkit.errors import CheckpointError, ConfigError, DatasetUnavailableError, GptqkitError
from support.fake_hub import fake_hub
from support.jobs import contents
from support.models import build, samples

SETTINGS = {"method": "rtn", "group_size": 32, "overrides": {"down_proj": {"bits": 8}}}
CALLS = [
    gptqkit.load,
    gptqkit.inspect,
    lambda model: gptqkit.compare([model], [[1, 2, 3]]),
    gptqkit.plan,
    lambda model: gptqkit.convert(model, "out", format="gptq"),
    lambda model: gptqkit.evaluate(model, [[1, 2, 3]]),
    lambda model: gptqkit.quantize(model, None, "out", SETTINGS),
]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder of a Hub: models are organisation/name/revision in it, and are copied to tmp_path / "cache"."""
    folder = tmp_path / "hub"

    def download(repo_id, *, revision=None, ignore_patterns=()):
        source, target = folder / repo_id / (revision or "main"), tmp_path / "cache" / repo_id / (revision or "main")
        if not source.is_dir():
            raise FileNotFoundError("404 Client Error.\n\nRepository Not Found for url: ...")
        ignore = shutil.ignore_patterns(*ignore_patterns)
        return str(shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=True))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return folder


def test_an_id_may_stand_wherever_a_folder_may(hub, tmp_path):
    build("llama").save_pretrained(hub / "org" / "float" / "v1")
    (hub / "org" / "float" / "v1" / "pytorch_model.bin").write_bytes(b"not to be fetched")
    cache = tmp_path / "cache" / "org" / "float" / "v1"
    run = {"revision": "v1", "device": "cpu"}
    assert gptqkit.plan("org/float", config=SETTINGS, run=run).blocks == 2
    choice = gptqkit.recommend("org/float", "1GB", "gptqkit", revision="v1")[0]
    assert shlex.split(choice.command)[:5] == ["gptqkit", "quantize", "org/float", "--revision", "v1"]
    assert [file.name for file in cache.iterdir() if file.suffix != ".json"] == []
    report = gptqkit.quantize("org/float", None, tmp_path / "out", SETTINGS, run=run).report
    assert report.model == "org/float"
    assert {(row.name.rpartition(".")[2] == "down_proj", row.bits) for row in report.modules} == {(True, 8), (False, 4)}
    assert [file.name for file in cache.iterdir() if file.suffix != ".json"] == ["model.safetensors"]

    shutil.copytree(tmp_path / "out", hub / "org" / "small" / "main")
    ids = samples().input_ids
    here, there = (gptqkit.load(path, device="cpu")[0] for path in (tmp_path / "out", "org/small"))
    assert gptqkit.inspect("org/small").bits == {4: 12, 8: 2}  # it is in the cache
    assert torch.equal(here(ids).logits, there(ids).logits)
    shutil.copytree(hub / "org" / "float" / "v1", hub / "org" / "float" / "main")
    how = {"sequence_length": 8, "device": "cpu"}
    for config, model in ((how, "org/small"), ({**how, "revision": "v1"}, "org/float")):
        scores = gptqkit.evaluate(model, ids[:1], config, reference="org/float")
        assert (scores.kl_divergence == 0) == (model == "org/float")
    [compared] = gptqkit.compare(["org/small"], ids[:1], how, reference="org/float")
    assert (compared.checkpoint, compared.scores.tokens) == ("org/small", scores.tokens)
    shutil.move(hub / "org" / "small" / "main", hub / "org" / "small" / "v3")
    [again] = gptqkit.compare(iter(["org/small"]), ids[:1], {**how, "revision": "v3"}, reference="org/float")
    assert again.scores.kl_divergence == compared.scores.kl_divergence
    shutil.move(hub / "org" / "small" / "v3", hub / "org" / "small" / "main")
    gptqkit.convert("org/small", tmp_path / "parts", format="gptq", shard_size=20000)
    files = list((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2
    for call in (gptqkit.load, gptqkit.inspect, gptqkit.doctor):
        with pytest.raises(DatasetUnavailableError, match=r"no such|does not give such a model at revision v9: 404 Cl"):
            call("org/small", revision="v9")
        with pytest.raises(ConfigError, match=r"revision is 'v1', but .*out is a folder here"):
            call(tmp_path / "out", revision="v1")


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    with fake_hub(monkeypatch, tmp_path / "cache") as found:
        yield found


@pytest.mark.parametrize("private", [False, True])
def test_a_finished_checkpoint_is_uploaded_and_nothing_else(endpoint, tmp_path, private, capsys):
    build("llama").save_pretrained(tmp_path / "float")
    out, kept = tmp_path / "out", {"model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"}
    endpoint.repositories["me/small"] = dict.fromkeys(sorted(kept), b"of an earlier upload")
    command = ["quantize", tmp_path / "float", out, "--method", "rtn", "--group-size", "32", "--device", "cpu"]
    command = [*map(str, command), "--push-to-hub", "me/small", *["--private"] * private]
    endpoint.broken = True
    assert cli.main(command) == 1
    error = capsys.readouterr().err
    assert "403" in error
    *_, again = error.strip().rpartition("to try again: ")
    assert again == f"hf upload me/small {out} . --delete 'model*.safetensors*'" + " --private" * private
    files = contents(out)
    assert "model.safetensors" in files
    assert endpoint.repositories["me/small"].keys() == kept
    for name in (".env", "optimizer.bin"):
        (out / name).write_text("secret")
    endpoint.broken = False
    assert cli.main([*command, "--resume"]) == 0
    assert capsys.readouterr().out.endswith(
        f"left as it was finished before: {out} and uploaded to {endpoint.url}/me/small\n"
    )
    assert endpoint.repositories["me/small"] == {**files, "notes.txt": b"of an earlier upload"}
    assert endpoint.wishes["me/small"].get("visibility") == ("private" if private else None)
    endpoint.repositories["me/small"].clear()
    run = {"push_to_hub": "me/small", "overwrite": True, "device": "cpu"}
    result = gptqkit.quantize(tmp_path / "float", None, out, {"method": "rtn", "group_size": 32}, run=run)
    assert result.url == f"{endpoint.url}/me/small"
    assert endpoint.repositories["me/small"] == files


@pytest.mark.parametrize("name", ["", "a/b/c", "https://hub/me", "me/", "--private", True])
def test_repositories_that_cannot_be_are_refused_before_any_work(name):
    with pytest.raises(ConfigError, match=r"push_to_hub is .*; give a repository's name, such as user/name"):
        gptqkit.Run(push_to_hub=name)


@pytest.mark.parametrize("shard_size", [4 << 30, 40000])
@pytest.mark.parametrize("desc_act", [False, True])
def test_of_a_model_on_the_hub_only_configs_and_headers_are_fetched_to_inspect_it(
    endpoint, tmp_path, shard_size, desc_act
):
    config = {"method": "rtn", "group_size": 32, "desc_act": desc_act, "overrides": {r"0\.mlp": {"skip": True}}}
    run = {"device": "cpu", "shard_size": shard_size}
    calibration = gptqkit.Calibration(samples().input_ids, sequence_length=24)
    gptqkit.quantize(build("llama", vocab_size=4096), calibration, tmp_path / "out", config, run=run)
    endpoint.put("org/small", tmp_path / "out")
    assert gptqkit.inspect("org/small") == gptqkit.inspect(tmp_path / "out")
    sent = {path: size for path, size in endpoint.sent.items() if path.endswith(".safetensors")}
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(sent) == len(files)
    assert sum(sent.values()) < sum(file.stat().st_size for file in files) / 2
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


GUIDED = [
    ("adapter_config.json adapter_model.safetensors", r"holds an adapter \(LoRA\).*merge_and_unload\(\)"),
    ("model-q4.gguf config.json", r"holds GGUF \(model-q4\.gguf\).*give (the model that it was made from|that file)"),
    ("config.json pytorch_model.bin", r"has only pickled weights \(pytorch_model\.bin\).*save_pretrained\('"),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("files", "message"), GUIDED)
def test_what_is_no_model_in_safetensors_is_named_with_what_to_do(call, files, message, endpoint, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in files.split():
        (folder / name).write_text("{}")
    endpoint.put("org/other", folder)
    for name in (folder, "org/other"):
        with pytest.raises(CheckpointError, match=f"^{name} {message}"):
            call(name)


@pytest.mark.parametrize("call", CALLS)
def test_a_gguf_file_is_named_with_what_to_do(call, tmp_path):
    (tmp_path / "a.gguf").touch()
    with pytest.raises(GptqkitError, match=r"a\.gguf (holds GGUF|is damaged|is a file by itself)"):
        call(tmp_path / "a.gguf")


@pytest.mark.parametrize("call", CALLS)
def test_what_does_not_exist_is_said_not_to(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", None)  # the Hub is not asked
        for name in ("models/none", "./none", str(tmp_path / "none"), "a/b/c", Path("none")):
            with pytest.raises(DatasetUnavailableError, match=f"there is no folder .*{Path(name).name}"):
                call(name)
        Path("model.safetensors").touch()
        with pytest.raises(DatasetUnavailableError, match=r"model\.safetensors is no folder"):
            call("model.safetensors")
    with pytest.raises(DatasetUnavailableError, match="there is no folder org/none, and the Hub does not give such a"):
        call("org/none")  # tests are offline
    assert not Path("out").exists()


def test_a_tokenizer_may_be_named(example_model, example_data, hub, tmp_path):
    build("llama", vocab_size=4096, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    (hub / "org").mkdir(parents=True)
    shutil.copytree(example_model, hub / "org" / "tokenizer" / "main")
    calibration = gptqkit.Calibration(example_data / "heldout.txt", samples=2, sequence_length=16)
    how = {"sequence_length": 16, "max_windows": 2, "device": "cpu"}
    found = []
    for name in (example_model, "org/tokenizer"):
        out = tmp_path / Path(name).name
        config = {"method": "gptq", "grid": "minmax", "refine_rounds": 0, "group_size": 32}
        gptqkit.quantize(tmp_path / "model", calibration, out, config, run={"device": "cpu"}, tokenizer=name)
        found.append(gptqkit.evaluate(out, example_data / "heldout.txt", how).perplexity)
        scores = gptqkit.evaluate(tmp_path / "model", example_data / "heldout.txt", how, tokenizer=name)
        assert scores.tokens == 30
    assert found[0] == found[1]
    with pytest.raises(DatasetUnavailableError, match=r"model holds no tokenizer"):
        gptqkit.evaluate(tmp_path / "model", [[1]], how, tokenizer=tmp_path / "model")


def test_settings_may_be_dictionaries_whose_names_are_checked(tmp_path):
    for settings, message in (
        ({"config": {"bit": 4}}, "'bit' is not a setting of QuantizeConfig; did you mean bits"),
        ({"run": {"shard-size": 4}}, "'shard-size' is not a setting of Run; did you mean shard_size"),
        ({"run": gptqkit.QuantizeConfig()}, "is not a Run; give one, or a dictionary of its fields"),
    ):
        for call in (gptqkit.plan, lambda model, **options: gptqkit.quantize(model, None, "out", **options)):
            with pytest.raises(ConfigError, match=message):
                call(tmp_path, **settings)
    with pytest.raises(ConfigError, match="'windows' is not a setting of Evaluation; did you mean max_windows"):
        gptqkit.evaluate(tmp_path, [[1]], {"windows": 4})


@pytest.mark.parametrize("kind", [str, pytest.param(Path, marks=pytest.mark.slow)])
def test_a_leading_tilde_is_the_home_folder_wherever_a_path_may_stand(kind, example_model, tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    build("llama", vocab_size=4096, num_hidden_layers=1).save_pretrained(home / "float")
    (home / "text.txt").write_text("Call me Ishmael. " * 50)
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    model, text, run, how = kind("~/float"), kind("~/text.txt"), {"device": "cpu"}, {"sequence_length": 16}
    calibration = {"source": [text], "samples": 2, "sequence_length": 16}
    how |= {"max_windows": 2, "device": "cpu"}
    named = {"tokenizer": example_model, "run": run}
    config = {"method": "rtn", "group_size": 32}
    gptqkit.quantize(model, calibration, kind("~/out"), config, evaluate_on=text, **named)
    out = kind("~/out")
    assert gptqkit.evaluate(out, text, how, reference=model, tokenizer=example_model).kl_divergence is not None
    assert gptqkit.load(out, device="cpu")[0].gptqkit_backend
    assert gptqkit.inspect(out).format == "gptq_v2"
    assert gptqkit.compare([out], text, how, reference=model)[0].scores.perplexity > 0
    assert "out" in gptqkit.report_html(out)
    assert gptqkit.report_svg(out)
    assert gptqkit.plan(model, kind("~/planned"), run=run).blocks == 1
    assert gptqkit.recommend(model, "1GB", "vllm")
    gptqkit.convert(out, kind("~/converted"), format="gptq")
    assert gptqkit.diff(out, kind("~/converted")) == []
    assert gptqkit.doctor(kind("~/converted")).damage == ()
    gptqkit.imatrix(model, {**calibration, "source": text}, kind("~/imatrix.gguf"), **named)
    gptqkit.rotate(model, kind("~/rotated"))
    assert cli.main(["plan", "~/float", "--out=~/planned", "--device", "cpu"]) == 0
    assert cli.main(["report", "~/out", "--html=~/page.html"]) == 0
    found = {path.name for path in home.iterdir()}
    assert found == {"float", "text.txt", "out", "converted", "imatrix.gguf", "rotated", "page.html"}
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("call", CALLS)
def test_an_empty_name_is_not_the_current_folder(call, example_model, monkeypatch):
    monkeypatch.chdir(example_model)
    with pytest.raises(ConfigError, match=r"a path or id is empty; give one, or '\.' for the current folder"):
        call("")
    with pytest.raises(ConfigError, match="is empty"):
        gptqkit.quantize(example_model, None, "", SETTINGS)
    with pytest.raises(ConfigError, match="is empty"):
        gptqkit.evaluate(example_model, "")
