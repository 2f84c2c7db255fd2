import json

import numpy as np
import pytest

from gptqkit.calibration.config import Calibration
from gptqkit.errors import ConfigError
from gptqkit.evaluation.config import Evaluation
from gptqkit.quantizer.config import ModuleOverride, QuantizeConfig, _compiled
from gptqkit.run import Run
from gptqkit.settings import settings_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 5}, "bits is 5"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": -2}, "group_size is -2"),
        ({"method": "awq"}, "method is 'awq'"),
        ({"format": "exl2"}, "format is 'exl2'"),
        ({"type": "Q4_KM"}, "type is 'Q4_KM'; choose one of Q4_0, .*; did you mean Q4_K_M?"),
        ({"quality": "balance"}, "quality is 'balance'; choose one of .*; did you mean balanced?"),
        ({"type": "Q4_K_M", "bits": 3}, "bits is 3, but the type Q4_K_M makes it 4; leave it out"),
        ({"type": "Q3_K_S", "format": "gptq"}, "format is gptq, but the type Q3_K_S makes it gguf"),
        ({"learn_iterations": -1}, "learn_iterations is -1; give 0 for none"),
        ({"method": "rtn", "refine_rounds": 1}, "refine_rounds needs the Hessian"),
        ({"type": "Q3_K_S", "tune_epochs": 1}, "scales of GGUF's blocks are not tuned"),
        ({"type": "Q3_K_S", "desc_act": True}, "set static_groups beside desc_act"),
        ({"overrides": {"q_proj": {"type": "Q4"}}}, "type is 'Q4'"),
        ({"overrides": {"q_proj": {"bits": 4}}, "type": "Q6_K"}, "override 'q_proj' gives bits or groups"),
        ({"overrides": {5: {"bits": 4}}}, "override pattern 5 is not a regular expression"),
        ({"target_size": -5}, "target_size is -5; give bytes, or a text such as 8GiB"),
        ({"overrides": {"q_proj": {"type": "q4_0", "skip": True}}}, "not both"),
        ({"damp_percent": 0.0}, "damp_percent is 0.0"),
        ({"damp_percent": 1.0}, "damp_percent is 1.0"),
        ({"alpha": 1.5}, "alpha is 1.5; it must lie between 0 and 1"),
        ({"alpha": 0.25, "method": "gptq"}, "alpha is 0.25, but gptq has no correction; leave it out"),
        ({"alpha": 0.5, "quality": "fast"}, "alpha is 0.5, but gptq has no correction"),
        ({"block_size": 0}, "block_size is 0"),
        ({"desc_act": True, "act_group_aware": True}, "two orders"),
        ({"bits": 4.0}, "bits is 4.0"),
        ({"group_size": "128"}, "group_size is '128'"),
        ({"group_size": 64.0}, "group_size is 64.0"),
        ({"overrides": {"q_proj": {"bit": 8}}}, "'bit' is not a setting of ModuleOverride; did you mean bits"),
        (
            {"overrides": {"q_proj": 8}},
            r"override 'q_proj' is 8; give \{'skip': True\} to leave .*, such as \{'bits': 8",
        ),
        ({"overrides": {"q_proj": False}}, r"override 'q_proj' is False; give \{'skip': True\}"),
        ({"overrides": [1]}, "give a dictionary of settings by pattern"),
        ({"overrides": {"(": ModuleOverride(skip=True)}}, r"'\(' is not a regular expression"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        QuantizeConfig(**settings)


@pytest.mark.parametrize(
    ("kind", "name", "value", "wanted"),
    [
        (QuantizeConfig, "sym", "false", "True or False"),
        (QuantizeConfig, "desc_act", 1, "True or False"),
        (QuantizeConfig, "refine_rounds", 1.5, "a whole number"),
        (QuantizeConfig, "tune_epochs", True, "a whole number"),
        (QuantizeConfig, "target_size", True, "bytes, or a text such as 8GiB"),
        (Run, "shard_size", 2.5, "bytes, or a text such as 8GiB"),
        (QuantizeConfig, "damp_percent", "0.1", "a number"),
        (QuantizeConfig, "target_bits", "3", "a number"),
        (Calibration, "samples", 2.5, "a whole number"),
        (Calibration, "seed", 1.5, "a whole number"),
        (Calibration, "seed", None, "a whole number"),
        (Run, "batch_size", 2.5, "a whole number"),
        (Run, "resume", "no", "True or False"),
        (Evaluation, "batch_size", 2.5, "a whole number"),
    ],
)
def test_settings_of_another_type_are_refused_by_name(kind, name, value, wanted):
    source = {"source": None} if kind is Calibration else {}
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}; give {wanted}$"):
        settings_of(kind, {**source, name: value})


def test_sizes_may_be_texts_as_on_the_command_line():
    assert Run(shard_size="1.5GiB").shard_size == 3 << 29
    config = QuantizeConfig(target_size="5MB")
    assert config.target_size == 5_000_000
    assert QuantizeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ConfigError, match="target_size: '5 apples' is no size; give one such as 8GiB"):
        QuantizeConfig(target_size="5 apples")


def test_the_first_matching_override_counts():
    overrides = {
        r"layers\.0\.": ModuleOverride(bits=8, group_size=-1),
        r"down_proj$": ModuleOverride(skip=True),
        r"o_proj": ModuleOverride(group_size=32),
    }
    config = QuantizeConfig(bits=4, group_size=128, overrides=overrides)
    first = config.for_module("model.layers.0.mlp.down_proj")
    assert (first.bits, first.group_size) == (8, None)
    assert config.for_module("model.layers.1.mlp.down_proj") is None
    third = config.for_module("model.layers.1.self_attn.o_proj")
    assert (third.bits, third.group_size) == (4, 32)
    assert config.for_module("model.layers.1.self_attn.q_proj") is config
    with pytest.raises(ConfigError, match="not both"):
        ModuleOverride(skip=True, bits=4)


def test_every_pattern_is_compiled_once_however_many_there_are():
    names = [f"layers.{number}.once" for number in range(600)]
    before = _compiled.cache_info().misses
    config = QuantizeConfig(overrides={f"^{name}$": ModuleOverride(bits=8) for name in names})
    assert {config.for_module(name).bits for name in names[::100]} == {8}
    assert _compiled.cache_info().misses == before + 600


def test_defaults_that_depend_on_other_settings():
    assert QuantizeConfig(group_size=-1) == QuantizeConfig(group_size=None)
    assert QuantizeConfig().act_group_aware is True
    assert QuantizeConfig(desc_act=True).act_group_aware is False
    assert QuantizeConfig(method="rtn").grid == "minmax"
    assert QuantizeConfig().quality == "balanced"
    assert QuantizeConfig(method="gptq").quality == "fast"
    alphas = {"rtn": None, "gptq": None, "gptaq": 0.25, "qep": 0.5, "loaq": 0.5}
    assert {name: QuantizeConfig(method=name).alpha for name in alphas} == alphas
    assert QuantizeConfig(method="qep", alpha=0.75).plain_rounding().alpha is None
    assert QuantizeConfig(quality="best").tune_epochs > QuantizeConfig(quality="best", type="Q4_K_M").tune_epochs == 0


def test_json_brings_every_setting_back():
    config = QuantizeConfig(bits=2, sym=False, desc_act=True, overrides={"x": ModuleOverride(bits=8)})
    assert QuantizeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ConfigError, match="a checkpoint's settings, not those of QuantizeConfig: give bits"):
        settings_of(QuantizeConfig, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match="'group-size' is not a setting of QuantizeConfig; did you mean group_size"):
        QuantizeConfig.from_dict({"group-size": 1})
    with pytest.raises(ConfigError, match="damp_percent is 'much'; give a number"):
        QuantizeConfig.from_dict({"damp_percent": "much"})
    numbers = QuantizeConfig(bits=np.int64(2), damp_percent=np.float32(0.5), refine_rounds=np.int32(1))
    assert QuantizeConfig.from_dict(json.loads(json.dumps(numbers.to_dict()))) == numbers
    with pytest.raises(ConfigError, match="'colour' is not a setting of ModuleOverride"):
        QuantizeConfig.from_dict({"overrides": {"x": {"colour": 1}}})
