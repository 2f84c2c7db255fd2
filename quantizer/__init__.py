"""Weights and statistics of their inputs -> integer codes, scales and zeros."""

from .config import ModuleOverride, QuantizeConfig
from .quantized import QuantizedWeight

__all__ = ["ModuleOverride", "QuantizeConfig", "QuantizedWeight"]
