"""A checkpoint's tensors put into an empty model: quantized layers in place of its matrices, and everything else."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.pytorch_utils import Conv1D

from .architecture import without_bars
from .errors import CheckpointError
from .export.names import Part, StoredNames, is_transposed
from .export.reader import Checkpoint, LayerSpec
from .export.shards import some
from .kernels.backend import BackendChoice, choose_backend, make_linear, summarize
from .kernels.experts import Pieces, QuantExperts
from .kernels.linear import QuantLinear
from .kernels.packed import PackedWeight

# Buffers that old versions of transformers stored and that every model now makes by itself.
_STALE = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$")


def install(
    model: Any, checkpoint: Checkpoint, *, backend: str, device: torch.device, dtype: torch.dtype
) -> BackendChoice:
    """Put everything that `checkpoint` holds into `model`; what its quantized layers run on.

    Args:
        model: As `empty_model` makes it.
        checkpoint: The checkpoint.
        backend: "auto" or the name of a backend.
        device: Where the layers are to run.
        dtype: Of activations, and of all weights that are not quantized.

    Raises:
        CheckpointError: Tensors that do not fit the model, or that are missing.
        BackendError: `backend` cannot serve a layer.
    """
    installer = _Installer(model, checkpoint, backend, device, dtype)
    installer.install_layers()
    installer.install_tensors()
    return summarize(installer.choices)


class _Installer:
    def __init__(self, model: Any, checkpoint: Checkpoint, backend: str, device: torch.device, dtype: torch.dtype):
        self.model, self.checkpoint = model, checkpoint
        self.backend, self.device, self.dtype = backend, device, dtype
        self.choices: list[BackendChoice] = []
        self.names = StoredNames(model, [*(f"{name}.weight" for name in checkpoint.layers), *checkpoint.other_names])
        self.others = set(checkpoint.other_names)
        self.biases: dict[str, Tensor] = {}

    def install_layers(self) -> None:
        """Put quantized layers in the place of every parameter that is quantized, wholly or in part."""
        quantized: dict[str, dict[str, LayerSpec]] = defaultdict(dict)
        tied: dict[str, str] = getattr(self.model, "all_tied_weights_keys", {})
        for spec in self.checkpoint.layers.values():
            part = self.names.find(f"{spec.name}.weight")
            if part is None:
                raise CheckpointError(
                    f"{spec.name}.qweight belongs to no module of {type(self.model).__name__}, which has for example "
                    f"{some(name for name, _ in self.model.named_modules() if name)}; the model is built differently "
                    "in this version of transformers"
                )
            if part.parameter in (*tied, *tied.values()):
                raise CheckpointError(
                    f"{spec.name} is quantized, but its weight is tied to another; correct config.json"
                )
            quantized[part.parameter][part.name] = spec
        for parameter, specs in quantized.items():
            self._replace(parameter, specs)

    def _replace(self, parameter: str, specs: dict[str, LayerSpec]) -> None:
        """Put layers in the place of one parameter."""
        path, _, attribute = parameter.rpartition(".")
        owner = self.model.get_submodule(path)
        layers: dict[int | None, list[tuple[Part, nn.Module]]] = defaultdict(list)
        for part in self.names.parts(parameter):  # by expert
            shape = self._shape(part, owner)
            spec = specs.get(part.name)
            layer = self._float(part, shape) if spec is None else self._quantized(part, spec, owner, shape)
            layers[part.expert].append((part, layer))
        rows = self._shape(Part(parameter, parameter), owner)[0]
        stacks = {
            expert: Pieces([layer for _, layer in pieces], [part.rows for part, _ in pieces], rows)
            for expert, pieces in layers.items()
        }
        if None in stacks:
            whole = stacks[None]
            self.model.set_submodule(path, whole.layers[0] if whole.rows == [None] else whole)
            return
        delattr(owner, attribute)
        owner.add_module(attribute, QuantExperts(list(stacks.values())))
        owner.config._experts_implementation = "eager"  # the only one that takes experts one by one

    def _shape(self, part: Part, owner: nn.Module) -> tuple[int, int]:
        """Rows and columns of a stored matrix as the model has it: (out, in)."""
        rows, columns = owner.get_parameter(part.parameter.rpartition(".")[2]).shape[-2:]
        if isinstance(owner, Conv1D) or is_transposed(self.model, part.parameter):
            rows, columns = columns, rows
        return (rows if part.rows is None else len(range(rows)[part.rows])), columns

    def _quantized(self, part: Part, spec: LayerSpec, owner: Any, shape: tuple[int, int]) -> QuantLinear:
        """The layer of a quantized matrix."""
        if part.expert is None and not isinstance(owner, (nn.Linear, Conv1D)):
            raise CheckpointError(
                f"{spec.name} is quantized, but the model has a {type(owner).__name__} there, no Linear"
            )
        if shape != (spec.out_features, spec.in_features):
            raise CheckpointError(
                f"{spec.name}.qweight stands for {spec.out_features} x {spec.in_features} weights (out x in), but the "
                f"model that config.json describes has {shape[0]} x {shape[1]}; fetch config.json again"
            )
        tensors = self.checkpoint.layer(spec.name)
        bias = tensors["bias"]
        name = part.parameter.removesuffix(".weight")
        if part.expert is not None:
            name = f"{name}.{part.expert}"
            self._keep_bias(part, spec, bias)
            bias = None  # the model's own parameter has those of all experts
        elif bias is None and owner.bias is not None:
            raise CheckpointError(f"{spec.name}.bias is missing; fetch the files again")
        elif bias is not None and owner.bias is None:
            self._check_zero(spec, bias)
            bias = None
        packed = PackedWeight(
            name=name,
            qweight=tensors["qweight"].to(self.device),
            qzeros=tensors["qzeros"].to(self.device),
            scales=tensors["scales"].to(self.device),
            g_idx=tensors["g_idx"].to(self.device),
            bias=None if bias is None else bias.to(self.device),
            bits=spec.bits,
            group_size=spec.group_size,
            zero_offset=spec.zero_offset,
            act_order=spec.act_order,
        )
        self.choices.append(choose_backend(self.backend, packed, self.dtype))
        return make_linear(self.choices[-1], packed, self.dtype)

    def _keep_bias(self, part: Part, spec: LayerSpec, bias: Tensor | None) -> None:
        """Remember an expert's bias until those of all experts are there."""
        if bias is None:
            return
        if self.names.parameter(f"{spec.name}.bias") == f"{part.parameter}_bias":
            self.biases[f"{spec.name}.bias"] = bias
        else:
            self._check_zero(spec, bias)

    def _check_zero(self, spec: LayerSpec, bias: Tensor) -> None:
        if bias.any():  # AutoGPTQ stores zeros
            raise CheckpointError(f"{spec.name}.bias is not expected: the model has no bias there")

    def _float(self, part: Part, shape: tuple[int, int]) -> nn.Linear:
        """The layer of a matrix that stayed in floating point beside quantized ones of the same parameter."""
        if part.name not in self.others:
            raise CheckpointError(f"{self.checkpoint.path} lacks {part.name}; fetch its files again")
        self.others.remove(part.name)
        weight = self.checkpoint.tensor(part.name)
        if tuple(weight.shape) != shape:
            raise CheckpointError(
                f"{part.name} has shape {tuple(weight.shape)}; the model that config.json describes needs {shape}"
            )
        layer = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight.to(self.device, self.dtype), requires_grad=False)
        return layer

    def install_tensors(self) -> None:
        """Load everything that is not quantized as transformers does, and tie what is tied."""
        self._check_names()
        state = {name: self.checkpoint.tensor(name) for name in self.checkpoint.other_names if name in self.others}
        self._join_experts(state)
        settings = LoadStateDictConfig(
            dtype=self.dtype,
            dtype_plan=self.model._get_dtype_plan(self.dtype),
            device_map={"": self.device},
            weight_mapping=get_model_conversion_mapping(self.model),
        )
        with without_bars():
            found, _ = convert_and_load_state_dict_in_model(self.model, state, settings)
        for name, stored, needed in found.mismatched_keys:
            raise CheckpointError(
                f"{name} has shape {tuple(stored)}; the model that config.json describes needs {tuple(needed)}"
            )
        if found.conversion_errors:
            raise CheckpointError(
                f"{some(found.conversion_errors)}: the stored tensors do not fit together; fetch the files again"
            )
        made = {name for name, _ in self.model.named_buffers()}  # those of quantized layers among them
        missing = set(found.missing_keys) - made
        missing -= {name for name, parameter in self.model.named_parameters() if not parameter.is_meta}
        # A file holds a tied weight once, under either name.
        self.model.tie_weights(missing_keys=missing, recompute_mapping=False)
        if missing:
            raise CheckpointError(f"{self.checkpoint.path} lacks {some(sorted(missing))}; fetch its files again")

    def _check_names(self) -> None:
        """Set aside what may be ignored, and refuse what the model has no place for."""
        meta = self.checkpoint.quantization_config.get("meta")
        carried: Iterable[str] = meta.get("carried_tensors", ()) if isinstance(meta, dict) else ()
        itself = {name for name, _ in self.model.named_buffers()}
        ignored = re.compile("|".join([*_STALE, *(self.model._keys_to_ignore_on_load_unexpected or ())]))
        homeless = [name for name in self.checkpoint.other_names if self.names.parameter(name) is None]
        self.others -= set(homeless)
        expected = {*carried, *itself}
        unexpected = [name for name in homeless if name not in expected and not ignored.search(name)]
        if unexpected:
            raise CheckpointError(
                f"{some(unexpected)}: no place for them in {type(self.model).__name__}; config.json describes another "
                "model"
            )

    def _join_experts(self, state: dict[str, Tensor]) -> None:
        """Replace tensors of single experts that transformers does not know in `state` by those of all experts."""
        of_parameter: dict[str, dict[str, Tensor]] = defaultdict(dict)
        singles = {name: tensor for name, tensor in state.items() if self.names.is_own(name)}
        for name, tensor in {**self.biases, **singles}.items():
            part = self.names.find(name)
            if part is not None:
                of_parameter[part.parameter][name] = tensor
                state.pop(name, None)
        for parameter, tensors in of_parameter.items():
            shape = self.model.get_parameter(parameter).shape
            state[parameter] = torch.empty(shape, dtype=next(iter(tensors.values())).dtype)
            for name, place in self.names.cut(parameter, state[parameter]).items():
                if name not in tensors:
                    raise CheckpointError(f"{self.checkpoint.path} lacks {name}; fetch its files again")
                if tensors[name].shape != place.shape:
                    raise CheckpointError(
                        f"{name} has shape {tuple(tensors[name].shape)}; the model that config.json describes needs "
                        f"{tuple(place.shape)}"
                    )
                place.copy_(tensors[name])
