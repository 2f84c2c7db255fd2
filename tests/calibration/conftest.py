from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

MODEL = Path(__file__).parents[2] / "examples" / "models" / "gutenberg-llama-6m"


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tokenizer of the example model: 4096 byte-level tokens, context 512, no chat template."""
    return AutoTokenizer.from_pretrained(MODEL)
