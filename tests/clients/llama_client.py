"""llama.cpp reads GGUF files: the weights that it decodes, and the log-probabilities that it computes, on the CPU.

    python llama_client.py --tokens FILE --out FOLDER NAME=FILE.gguf ...

For each file FOLDER/NAME.safetensors, with `logprobs` of the tokens of every window, (windows, length - 1), `tokens` of
a text, and `weight.<name in the file>` (out, in) float32 of every matrix in blocks.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.numpy import load_file, save_file

FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
TEXT = b"Hello world, it's 1234!\n\n  x"


class Traits(ctypes.Structure):
    """ggml_type_traits."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def decoded(file: Path) -> dict[str, np.ndarray]:
    """Every matrix in blocks, by llama.cpp's own functions."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    traits = ctypes.CDLL(str(folder / "libggml-base.so")).ggml_get_type_traits
    traits.restype, traits.argtypes = ctypes.POINTER(Traits), [ctypes.c_int]
    found = {}
    for tensor in GGUFReader(file).tensors:
        if tensor.tensor_type not in FLOATS:
            values = np.empty(tuple(int(size) for size in tensor.shape[::-1]), np.float32)
            raw = np.ascontiguousarray(tensor.data)
            traits(int(tensor.tensor_type)).contents.to_float(raw.ctypes.data, values.ctypes.data, values.size)
            found[tensor.name] = values
    return found


def read(file: Path, input_ids: np.ndarray) -> dict[str, np.ndarray]:
    length = input_ids.shape[1]
    defaults = llama_cpp.llama_model_default_params

    def plain() -> llama_cpp.llama_model_params:
        params = defaults()
        params.use_extra_bufts = False  # AMX, which crashes on some virtual machines
        return params

    llama_cpp.llama_cpp.llama_model_default_params = plain
    sizes = {"n_ctx": length, "n_batch": length, "n_ubatch": length}
    model = llama_cpp.Llama(str(file), **sizes, logits_all=True, verbose=False, n_threads=1)
    logprobs = []
    for row in input_ids:
        model.reset()
        model.eval(row.tolist())
        logits = np.array(model.scores[:length], np.float64)
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        logprobs.append(logits[np.arange(length - 1), row[1:]])
    tokens = np.array(model.tokenize(TEXT, add_bos=False), np.int64)
    weights = {f"weight.{name}": value for name, value in decoded(file).items()}
    return {"logprobs": np.stack(logprobs), "tokens": tokens, **weights}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    input_ids = load_file(arguments.tokens)["input_ids"]
    for pair in arguments.files:
        name, _, file = pair.partition("=")
        save_file(read(Path(file), input_ids), arguments.out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
