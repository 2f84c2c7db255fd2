"""Types that llama.cpp's own quantizer gave to the tensors of a model with 33 blocks, 4 queries to a key."""

import pytest

from gptqkit.errors import ConfigError
from gptqkit.export.recipes import GRIDS, RECIPES, choose_type, grid_settings

MORE = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, *range(28, 33)}  # blocks that get more bits
FIRST = {0, 1, 2, 3}
# recipe -> tensor -> type, or (type in some blocks, those, type in others); the rest take the recipe's own.
SEEN = {
    "Q2_K": {"attn_v": "q4_k", "attn_output": "q3_k", "ffn_down": "q3_k"},
    "Q3_K_S": {},
    "Q3_K_M": {"attn_v": ("q5_k", {0, 1}, "q4_k"), "attn_output": "q4_k", "ffn_down": ("q5_k", {0, 1}, "q4_k")},
    "Q3_K_L": {"attn_v": "q5_k", "attn_output": "q5_k", "ffn_down": "q5_k"},
    "Q4_0": {"ffn_down": ("q4_1", FIRST, "q4_0")},
    "Q4_K_S": {"attn_v": ("q5_k", FIRST, "q4_k"), "ffn_down": ("q5_k", FIRST, "q4_k")},
    "Q4_K_M": {"attn_v": ("q6_k", MORE, "q4_k"), "ffn_down": ("q6_k", MORE, "q4_k")},
    "Q5_0": {"ffn_down": ("q5_1", FIRST, "q5_0")},
    "Q5_K_S": {},
    "Q5_K_M": {"attn_v": ("q6_k", MORE, "q5_k"), "ffn_down": ("q6_k", MORE, "q5_k")},
    "Q6_K": {},
}


@pytest.mark.parametrize("recipe", SEEN)
def test_types_are_those_of_llama_cpp(recipe):
    for tensor in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        kind = SEEN[recipe].get(tensor, RECIPES[recipe])
        for layer in range(33):
            expected = kind if isinstance(kind, str) else kind[0] if layer in kind[1] else kind[2]
            assert choose_type(recipe, tensor, 256, layer=layer, layers=33, shared_by=4) == expected, (tensor, layer)
    assert choose_type(recipe, "output", 256) == "q6_k"
    assert choose_type(recipe, "token_embd", 256) == RECIPES[recipe]


def test_columns_that_are_no_super_blocks_take_larger_types():
    narrow = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
    for name in GRIDS:
        assert choose_type(name, "attn_v", 512) == name
        assert choose_type(name, "attn_v", 96) == narrow.get(name, name)
    assert choose_type("Q4_K_M", "output", 96) == "q8_0"
    assert choose_type("Q8_0", "output", 512) == "q8_0"


def test_mixtures_of_eight_keep_their_attention():
    assert choose_type("Q4_K_M", "attn_v", 512, layer=9, layers=32, experts=8) == "q8_0"
    assert choose_type("Q4_K_M", "attn_k", 512, layer=9, layers=32, experts=8) == "q8_0"
    assert choose_type("Q4_K_M", "attn_output", 512, layer=9, layers=32, experts=8) == "q5_k"
    assert choose_type("Q4_K_S", "attn_v", 512, layer=9, layers=80, shared_by=8) == "q5_k"


def test_names():
    assert grid_settings("Q3_K_M") == grid_settings("q3_k") == {"bits": 3, "group_size": 16, "sym": True}
    with pytest.raises(ConfigError, match="type is 'IQ4_XS'; choose one of Q4_0"):
        grid_settings("IQ4_XS")
