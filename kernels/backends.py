"""The backends: the classes that run quantized layers, by the names under which callers ask for them.

A new backend is one `QuantLinear` and one entry of `BACKENDS`. Nothing here imports torch.
"""

from __future__ import annotations

from ..errors import BackendError
from ..settings import one_of

BACKENDS = {
    "cuda": "kernels.cuda:CudaLinear",
    "cpu": "kernels.linear:CpuLinear",
    "torch": "kernels.linear:TorchLinear",
}
"""Every backend by name, with the place of its class in this package, in the order in which "auto" tries them.

The torch backend serves every layer on every device.
"""


def check_backend(requested: str) -> None:
    """Raise BackendError, before any work starts, for a name that is neither "auto" nor one of `BACKENDS`."""
    if requested != "auto" and requested not in BACKENDS:
        raise BackendError(f"backend is {requested!r}; {one_of(('auto', *BACKENDS), requested)}")
