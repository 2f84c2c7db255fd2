"""What the scripts that run inside a client's environment share: their arguments, and how they answer.

    python <client>.py --tokens FILE --out FOLDER [--kernel NAME] CHECKPOINT ...

Tokens are a safetensors file with one int64 tensor `input_ids` (windows, length). For each checkpoint the script writes
FOLDER/<checkpoint's name>.safetensors with what it computed or, where the client refuses the checkpoint, a .json with
the client's message. NAME is the client's own name of the kernel to use, where it has several; by default the client
chooses. `compare.py` sets the environment variables that the clients need.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def attempt(action: Callable[[], dict[str, Tensor]], target: Path) -> None:
    """Write what `action` returns to <target>.safetensors, or its refusal to <target>.json."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(action(), f"{target}.safetensors")
    except Exception as error:  # a client refuses with whatever class it likes
        message = f"{type(error).__name__}: {error}"
        Path(f"{target}.json").write_text(json.dumps({"refused": message}))


def answer(read: Callable[[Path, Tensor, str | None], dict[str, Tensor]]) -> None:
    """Run `read` on every checkpoint of the command line, with the tokens and the kernel."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernel")
    arguments = parser.parse_args()
    input_ids = load_file(arguments.tokens)["input_ids"]
    for checkpoint in arguments.checkpoints:
        attempt(lambda path=checkpoint: read(path, input_ids, arguments.kernel), arguments.out / checkpoint.name)
