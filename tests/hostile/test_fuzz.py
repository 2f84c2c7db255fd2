"""Random damage, from a seed: every mutant is refused in one line that names what is wrong, or read right."""

import copy
import json
import os
import random
import shutil
import signal
import struct
import warnings
from functools import partial

import pytest
import torch
from safetensors.torch import load, load_file, save_file

import gptqkit
from gptqkit.errors import GptqkitError
from support.models import build, save
from support.pipeline import quantize

SECONDS = 20  # for one mutant
JSON = ("config.json", "quantize_config.json", "generation_config.json")
TOKENS = torch.arange(1, 9)[None]
ODD = [
    *(None, True, False, 0, 1, -1, 3, 7, 64, 2**31, 10**9, 10**18, 10**300, 0.5, -1e308, float("nan"), float("inf")),
    *("", "x", "x" * 3000, "../../secret", "/etc/passwd", "\x00", "\ud800", "\x1b[2J\n", "float64", "gptq_v2", "auto"),
    *([], [[]], [5], ["x"] * 50, {}, {"x": {}}, {"x": [None]}, {"bits": 8}, {"rope_type": "yarn"}),
]
KEYS = (
    "dynamic",
    "meta",
    "format",
    "model_file_base_name",
    "desc_act",
    "sym",
    "auto_map",
    "text_config",
    "bits",
    "dtype",
)
PATTERNS = ("+:.*", "-:.*mlp.*", "+:(.*)+$", "((((", "+:.*up_proj")
KINDS = (
    *(
        getattr(torch, name)
        for name in ("int8", "int32", "int64", "bool", "float16", "float32", "complex64", "bfloat16")
    ),
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Checkpoints, and the format that each can be converted to."""
    folder, made = tmp_path_factory.mktemp("originals"), []
    with warnings.catch_warnings(action="ignore"):
        for name, before, after in (
            ("llama", "gptq", "gptq_v2"),
            ("mixtral", "gptq_v2", "gptq"),
            ("llama", "awq", "compressed-tensors"),
            ("llama", "compressed-tensors", "gptq_v2"),
        ):
            where = folder / f"{name} {before}"
            save(build(name, num_hidden_layers=1, tie_word_embeddings=name == "llama").half(), where / "model")
            act_order = name == "llama" and before != "awq"
            quantize(where / "model", where / "q", format=before, sym=before != "awq", desc_act=act_order)
            made.append((where / "q", after))
    return made


def entries(values):
    """All places in a tree of JSON, as the container and the key."""
    for key in list(values) if isinstance(values, dict) else range(len(values)):
        yield values, key
        if isinstance(values[key], (dict, list)):
            yield from entries(values[key])


def change_json(folder, chance):
    file = folder / chance.choice([name for name in JSON if (folder / name).exists()])
    values = json.loads(file.read_text())
    for _ in range(chance.choice((1, 1, 1, 3))):
        owner, key = chance.choice(list(entries(values)))
        act = chance.randrange(5)
        if act == 0:
            del owner[key]
        elif act == 1 and isinstance(owner, dict):
            owner[chance.choice((*KEYS, "\ud800", ""))] = copy.deepcopy(chance.choice(ODD))
        elif act == 2 and isinstance(values.get("quantization_config", values), dict):
            values.get("quantization_config", values)["dynamic"] = {
                chance.choice(PATTERNS): {"bits": chance.choice((4, 8))}
            }
        else:
            owner[key] = copy.deepcopy(chance.choice(ODD))
        if not values:
            break
    file.write_text(json.dumps(values))


def change_bytes(folder, chance):
    file = folder / chance.choice(("model.safetensors", "model.safetensors", *JSON))
    content = bytearray(file.read_bytes() if file.exists() else b"{}")
    for _ in range(chance.choice((1, 1, 4))):
        place = chance.randrange(min(len(content), chance.choice((8, 4000, 10**9))))
        act = chance.randrange(4)
        if act == 0:
            del content[place:]
        elif act == 1:
            del content[place : place + chance.randrange(1, 9)]
        elif act == 2:
            content[place:place] = chance.randbytes(chance.randrange(1, 9))
        else:
            content[place] ^= 1 << chance.randrange(8)
        if not content:
            break
    file.write_bytes(content)


def change_header(folder, chance):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    name = chance.choice(list(header))
    entry = header[name]
    act = chance.randrange(6)
    if act == 0:
        header[chance.choice(["1." * 40_000, "a\nb", "x.qweight", "\u00b2", "", name + ".weight", name[:-1]])] = (
            header.pop(name)
        )
    elif act == 1:
        header["__metadata__"] = chance.choice([{}, {"format": "tf"}, {"format": 5}, "x", {"x": "\ud800"}])
    elif "dtype" in entry and act == 2:
        entry["dtype"] = chance.choice(["I8", "F64", "BOOL", "I64", "C64", "F8_E4M3", "F4", "U16", "X", 5, None])
    elif "dtype" in entry and act == 3:
        entry["shape"] = chance.choice(
            [entry["shape"][::-1], [], [-1], [0], [2**40, 2**40], [1, *entry["shape"]], "x", None]
        )
    elif "dtype" in entry and act == 4:
        entry["data_offsets"] = chance.choice(
            [[0, 0], [0, 2**60], [8, 0], [-1, 4], header[chance.choice(list(header))], [0.5]]
        )
    else:
        del header[name]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def change_tensors(folder, chance):
    tensors = load_file(folder / "model.safetensors")
    name = chance.choice(list(tensors))
    tensor = tensors[name]
    act = chance.randrange(8)
    if act == 0:
        tensors[name] = tensor.view(-1)[: chance.randrange(tensor.numel() + 1)].clone()
    elif act == 1:
        tensors[name] = tensor.to(chance.choice(KINDS))
    elif act == 2:
        values = [torch.nan, torch.inf, 0, -1, 6e4] if tensor.is_floating_point() else [-1, 0, 1, 2**31 - 1]
        tensor.view(-1)[chance.randrange(tensor.numel())] = chance.choice(values)
    elif act == 3:
        del tensors[name]
    elif act == 4:
        suffixes = ("weight", "bias", "qweight", "scales", "qzeros", "g_idx", "dense", "words", "scale")
        tensors[f"{name.rpartition('.')[0]}.{chance.choice(suffixes)}"] = torch.zeros(64, 64).to(chance.choice(KINDS))
    elif act == 5:
        tensors[name.replace(".0.", f".{chance.choice((1, 7, 10**30))}.")] = tensors.pop(name)
    elif act == 6:
        tensors[name] = tensors[chance.choice(list(tensors))].clone()
    else:
        tensors[name] = torch.cat([tensor, tensor], chance.randrange(tensor.ndim) if tensor.ndim else 0)
    save_file(tensors, folder / "model.safetensors")


def change_files(folder, chance):
    file = folder / chance.choice(
        ["model.safetensors", *JSON, "tokenizer.json", "README.md", "extra.txt", "chat_template.jinja"]
    )
    file.unlink(missing_ok=True)
    act = chance.randrange(7)
    if act == 0:
        os.mkfifo(file)
    elif act == 1:
        file.symlink_to(
            chance.choice(["/dev/zero", "/dev/stdin", "../secret", "../../../../../etc/passwd", file.name, "gone"])
        )
    elif act == 2:
        file.mkdir()
    elif act == 3:
        file.write_bytes(chance.choice([b"", b"{}", b"[]", b"null", b"{" * 10**5, b"\x80\x04K\x01."]))
    elif act == 4:
        file.touch()
        os.truncate(file, 1 << 40)
    elif act == 5:
        index = {"weight_map": {"x": chance.choice(["../secret", "model.safetensors", "/dev/zero", 5])}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


CHANGES = (change_json, change_json, change_bytes, change_header, change_tensors, change_tensors, change_files)


class Hangs(BaseException):
    pass


def hang(*_):
    raise Hangs


def run(model):
    with torch.no_grad():
        return model(TOKENS).logits


def contents(folder):
    """Names, kinds and sizes, for files that may be endless."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def attempt(act, known):
    """Do something with a mutant; return the result, or None where it is refused as it should be."""
    signal.alarm(SECONDS)
    try:
        return act()
    except GptqkitError as error:
        said = str(error)
        assert "\n" not in said
        assert len(said) <= 2000
        assert any(name in said for name in known), said
        return None
    finally:
        signal.alarm(0)


def check(original, other, place, chance):
    """Make a mutant and go through all that is done with checkpoints; what is wrong is raised."""
    folder, out = place / "model", place / "out"
    shutil.copytree(original, folder)
    (place / "secret").write_text("the secret")
    with warnings.catch_warnings(action="ignore"):
        try:
            chance.choice(CHANGES)(folder, chance)
        except UnicodeEncodeError:  # nobody can write that
            return "none"
        before = contents(folder)
        tensors = load((original / "model.safetensors").read_bytes())
        known = {str(folder), "model.layers.", "x.q", *tensors, *(name.rpartition(".")[0] for name in tensors)}
        attempt(partial(gptqkit.inspect, folder), known)
        attempt(partial(gptqkit.doctor, folder, place / "repaired"), known)
        loaded = attempt(partial(gptqkit.load, folder, device="cpu"), known)
        logits = None if loaded is None else attempt(partial(run, loaded[0]), known)
        attempt(partial(gptqkit.convert, folder, out, format=other), known)
        assert contents(folder) == before
        assert {path.name for path in place.iterdir()} <= {"model", "out", "repaired", "secret"}
        if out.exists():
            assert not any(
                path.is_symlink() or b"the secret" in path.read_bytes() for path in out.rglob("*") if not path.is_dir()
            )
            again = attempt(partial(gptqkit.load, out, device="cpu"), {*known, str(out)})
            if again is not None and loaded is not None:
                assert torch.equal(run(again[0]), logits)
    return "refused" if loaded is None else "read"


@pytest.mark.parametrize("count", [40, pytest.param(1500, marks=pytest.mark.slow)])
def test_mutants(originals, tmp_path, count):
    handler = signal.signal(signal.SIGALRM, hang)
    wrong, seen = [], []
    try:
        for seed in range(count):
            place = tmp_path / str(seed)
            place.mkdir()
            try:
                seen.append(check(*originals[seed % len(originals)], place, random.Random(seed)))
            except Exception as error:
                wrong.append(f"{seed}: {type(error).__name__}: {error}"[:400])
            except Hangs:
                wrong.append(f"{seed} hangs")
            shutil.rmtree(place)
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert not wrong, "\n".join(wrong)
    assert min(seen.count("read"), seen.count("refused")) > count // 10
