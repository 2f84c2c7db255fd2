"""Damaged GGUF files end in one line that names the file, before anything large is made of what they say."""

import random
import struct
import tracemalloc
from contextlib import suppress

import pytest
import torch

import gptqkit
from gptqkit.errors import CheckpointError, GptqkitError
from support.gguf_files import NARROW, build, save, tokens
from support.pipeline import quantize


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """The bytes of a small valid file."""
    folder = tmp_path_factory.mktemp("gguf")
    save(build(**{**NARROW, "num_hidden_layers": 1}), folder / "float")
    quantize(folder / "float", folder / "out", tokens(2), type="Q4_0", method="rtn", group_size=128, sym=True)
    return (folder / "out" / "model.gguf").read_bytes()


@pytest.fixture
def write(tmp_path):
    def make(data):
        file = tmp_path / "model.gguf"
        file.write_bytes(data)
        return file

    return make


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def made(entries=(), tensors=(), counts=None, data=b""):
    """A file of metadata (key, type, value) and tensors (name, dimensions, type, offset); counts may lie."""
    head = b"GGUF" + struct.pack("<I2Q", 3, *(counts or (len(tensors), len(entries))))
    for key, kind, value in entries:
        head += text(key) + struct.pack("<I", kind) + value
    for name, shape, kind, start in tensors:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)
    return head + bytes(-len(head) % 32) + data


ARCHITECTURE = ("general.architecture", 8, text("llama"))
NORM = ("output_norm.weight", (8,), 0, 0)
BLOCKS = ("llama.block_count", 4, struct.pack("<I", 0))


def test_what_is_whole_opens(write, content):
    assert list(gptqkit.open_checkpoint(write(content)).layers)
    assert gptqkit.open_checkpoint(write(made([ARCHITECTURE, BLOCKS], [NORM], data=bytes(32)))).other_names


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin with GGUF"),
        (b"GGUF", "damaged"),
        (b"PK\x03\x04" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I2Q", 9, 0, 0), "version 9"),
        (made(counts=(0, 1 << 60)), "damaged"),
        (made(counts=(1 << 60, 0)), "damaged"),
        (made([("a", 9, struct.pack("<IQ", 0, 1 << 60))]), "damaged"),
        (made([("a", 9, struct.pack("<IQ", 8, 1 << 60))]), "damaged"),
        (made([("a", 9, struct.pack("<IQ", 9, 4) + struct.pack("<IQ", 9, 4) * 4)]), "an array of values of type 9"),
        (made([("a", 8, struct.pack("<Q", 1 << 62))]), "damaged"),
        (made([("a", 77, b"")]), "a value of type 77"),
        (made([ARCHITECTURE, ARCHITECTURE]), r"two values of general\.architecture"),
        (made([("general.alignment", 4, struct.pack("<I", 3))]), "an alignment of 3"),
        (made([("general.alignment", 8, text("x"))]), "an alignment of 'x'"),
        (made([ARCHITECTURE], [NORM, NORM], data=bytes(64)), "two tensors output_norm"),
        (made([ARCHITECTURE], [("x", (1 << 40, 1 << 40), 0, 0)], data=bytes(64)), "damaged"),
        (made([ARCHITECTURE], [("x", (0, 8), 0, 0)], data=bytes(64)), "damaged"),
        (made([ARCHITECTURE], [("x", (33, 8), 2, 0)], data=bytes(640)), "33 are no whole blocks of 32"),
        (made([ARCHITECTURE], [("x", (256, 8), 23, 0)], data=bytes(9000)), "holds a tensor of ggml's type 23; q4_0,"),
        (made([ARCHITECTURE], [("x", (8,) * 9, 0, 0)], data=bytes(64)), "one of 9 dimensions"),
        (made([ARCHITECTURE], [("x", (8,), 0, 1 << 50)], data=bytes(64)), "damaged"),
        (made([ARCHITECTURE], [("x", (8,), 0, 4)], data=bytes(64)), "damaged"),
        (made([], [NORM], data=bytes(32)), "architecture None"),
        (made([("general.architecture", 8, text("mamba"))]), "architecture 'mamba'; llama, qwen2"),
        (made([("general.architecture", 4, struct.pack("<I", 1))]), "architecture 1;"),
        (made([ARCHITECTURE, BLOCKS], [("secret.weight", (8,), 0, 0)], data=bytes(32)), "not known to have"),
        (made([ARCHITECTURE, BLOCKS], [("output_norm.weight", (4, 2), 0, 0)], data=bytes(32)), "2 dimensions"),
        (made([ARCHITECTURE], [NORM], data=bytes(32)), "speaks of None blocks and holds 0"),
        (made([("split.count", 2, struct.pack("<H", 3))]), "one of 3 parts; join them with llama-gguf-split --merge"),
        (
            made([ARCHITECTURE, ("llama.block_count", 4, struct.pack("<I", 1 << 31))], [NORM], data=bytes(32)),
            "speaks of 2147483648 blocks and holds 0",
        ),
        (made([ARCHITECTURE, BLOCKS], [("blk.7.attn_norm.weight", (8,), 0, 0)], data=bytes(32)), "speaks of 0 blocks"),
    ],
)
def test_what_cannot_be_is_refused(write, data, message):
    file = write(data)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message) as found:
        gptqkit.open_checkpoint(file)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
    assert str(file) in str(found.value)
    assert len(str(found.value).splitlines()) == 1


def test_a_file_that_is_cut_off_anywhere_is_refused(write, content):
    generator = random.Random(0)
    for length in {0, 4, 8, 23, 24, 100, len(content) - 1, *(generator.randrange(len(content)) for _ in range(40))}:
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            gptqkit.open_checkpoint(write(content[:length]))


@pytest.mark.parametrize("count", [20, pytest.param(600, marks=pytest.mark.slow)])
def test_random_damage_is_refused_or_read(write, content, count):
    """Mutants of the header and of the blocks: an error of ours, or a model."""
    generator = random.Random(count)
    begin = content.index(b"output_norm")
    for _ in range(count):
        mutant = bytearray(content)
        for _ in range(generator.choice((1, 1, 3))):
            place = generator.choice(
                (generator.randrange(len(content)), generator.randrange(2000), begin + generator.randrange(200))
            )
            mutant[place : place + 1] = bytes([generator.choice((0, 255, generator.randrange(256)))])
        with suppress(GptqkitError):
            model, _ = gptqkit.load(write(bytes(mutant)), device="cpu")
            model(torch.arange(1, 9)[None])


def test_numbers_that_are_none_are_refused(write, content):
    name = b"blk.0.ffn_up.weight"
    file = write(content)
    found = gptqkit.open_checkpoint(file)
    blocks = found.tensor("model.layers.0.mlp.up_proj.q4_0").numpy().tobytes()
    place = content.index(blocks)
    assert name in content
    with pytest.raises(CheckpointError, match=r"up_proj\.q4_0 holds NaN or infinity"):
        gptqkit.load(write(content[:place] + b"\x00\x7e" + content[place + 2 :]), device="cpu")
