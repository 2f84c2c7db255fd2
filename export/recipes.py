"""Which block type every tensor of a GGUF file takes: the recipes of llama.cpp, tensor by tensor.

Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..settings import one_of

GRIDS = {
    "q4_0": (4, 32, True),
    "q4_1": (4, 32, False),
    "q5_0": (5, 32, True),
    "q5_1": (5, 32, False),
    "q8_0": (8, 32, True),
    "q2_k": (2, 16, False),
    "q3_k": (3, 16, True),
    "q4_k": (4, 32, False),
    "q5_k": (5, 32, False),
    "q6_k": (6, 16, True),
}
"""Bits, columns per group, and whether it is symmetric, of every block type."""

_NAMES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K"
RECIPES = {name: name[:4].lower() for name in _NAMES.split()}
"""Every recipe with the block type that most of its tensors take."""

TYPES = (*RECIPES, *GRIDS)
"""What may be asked for: recipes, or a single block type for all Linears."""

SUPER_BLOCK = 256

_NARROW = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}  # of 32 columns


def grid_settings(name: str) -> dict[str, Any]:
    """Return bits, group_size and sym of a recipe's main block type, or a block type; ConfigError for another name."""
    if name not in TYPES:
        raise ConfigError(f"type is {name!r}; {one_of(TYPES, name)}")
    return dict(zip(("bits", "group_size", "sym"), GRIDS[RECIPES.get(name, name)], strict=True))


def choose_type(
    recipe: str, tensor: str, columns: int, *, layer: int = 0, layers: int = 1, experts: int = 0, shared_by: int = 1
) -> str:
    """Return the block type of one tensor, as llama.cpp's own quantizer chooses it where it has an importance matrix.

    Args:
        recipe: One of `TYPES`; a single block type is every tensor's.
        tensor: Its name without the block's number, such as "ffn_down"; "output" is also an embedding that is the
            output layer's weight.
        columns: Of its rows. Where they are no whole super-blocks, a type with blocks of 32 takes the place.
        layer: Number of the block.
        layers: Number of blocks.
        experts: Of a mixture.
        shared_by: Queries that share a key.

    >>> choose_type("Q4_K_M", "attn_v", 4096, layer=0, layers=32), choose_type("Q4_K_M", "attn_q", 4096)
    ('q6_k', 'q4_k')
    >>> choose_type("Q2_K", "ffn_down", 4096), choose_type("Q3_K_S", "attn_q", 96)
    ('q3_k', 'q4_0')
    """
    base = RECIPES.get(recipe, recipe)
    found = base
    if recipe in RECIPES:
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        if tensor == "output":
            whole = columns % (SUPER_BLOCK if base in _NARROW else 32) == 0
            found = "q8_0" if base == "q8_0" or not whole else "q6_k"
        elif tensor in ("attn_v", "attn_qkv"):
            found = _value_type(recipe, base, layer, more=more, shared_by=shared_by)
            if layers == 80 and shared_by == 8 and found in ("q3_k", "q4_k"):  # of 70B models, small and worth it
                found = "q5_k"
            found = "q8_0" if experts == 8 else found
        elif tensor == "attn_k":
            found = "q8_0" if experts == 8 else base
        elif tensor.startswith("ffn_down"):
            first = layer < layers // 8
            found = {
                "Q2_K": "q3_k",
                "Q3_K_M": "q5_k" if layer < layers // 16 else "q4_k",
                "Q3_K_L": "q5_k",
                "Q4_K_M": "q6_k" if more else base,
                "Q5_K_M": "q6_k" if more else base,
                "Q4_K_S": "q5_k" if first else base,
                "Q4_0": "q4_1" if first else base,
                "Q5_0": "q5_1" if first else base,
            }.get(recipe, base)
        elif tensor == "attn_output" and experts == 8:
            found = "q5_k" if base in ("q2_k", "q3_k", "q4_k") and recipe != "Q3_K_L" else base
        elif tensor == "attn_output":
            found = {"Q2_K": "q3_k", "Q3_K_M": "q4_k", "Q3_K_L": "q5_k"}.get(recipe, base)
    return found if columns % SUPER_BLOCK == 0 else _NARROW.get(found, found)


def _value_type(recipe: str, base: str, layer: int, *, more: bool, shared_by: int) -> str:
    """Return the type of the value projection, alone or fused with query and key."""
    return {
        "Q2_K": "q4_k" if shared_by >= 4 else "q3_k",
        "Q3_K_M": "q5_k" if layer < 2 else "q4_k",
        "Q3_K_L": "q5_k",
        "Q4_K_M": "q6_k" if more else base,
        "Q5_K_M": "q6_k" if more else base,
        "Q4_K_S": "q5_k" if layer < 4 else base,
    }.get(recipe, base)
