"""The solvers for GPTQ version 2 or, where the settings say so, version 1 or blocks of GGUF, straight from matrices."""

from gptqkit.export.blocks import BLOCKS
from gptqkit.quantizer import gptq
from gptqkit.quantizer.grid import IntegerZeroPoint
from gptqkit.quantizer.methods import Moments


def snap_of(config):
    if config.type is not None:
        return BLOCKS[config.type].snap
    return IntegerZeroPoint(least=1 if config.format == "gptq" else 0)


def solve_gptq(weight, hessian, config):
    return gptq.solve_gptq(weight, Moments(hessian=hessian), config, snap_of(config))


def solve_gptaq(weight, hessian, cross, config):
    return gptq.solve_gptaq(weight, Moments(hessian=hessian, cross=cross), config, snap_of(config))


def solve_qep(weight, hessian, cross, config):
    return gptq.solve_qep(weight, Moments(hessian=hessian, cross=cross), config, snap_of(config))


def solve_loaq(weight, hessian, cross, drift, config):
    return gptq.solve_loaq(weight, Moments(hessian=hessian, cross=cross, drift=drift), config, snap_of(config))


def solve_rtn(weight, config, hessian=None):
    moments = None if hessian is None else Moments(hessian=hessian)
    return gptq.solve_rtn(weight, moments, config, snap_of(config))
