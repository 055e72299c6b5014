"""Runs programs of ``torch.export`` that somebody sent, without running code that is in them.

``torch.export.load`` runs any code in a file: it unpickles, and evaluates as Python what the file gives as shapes.
:class:`AtenProgram` reads the graph as JSON and the weights as plain bytes, and runs the nodes one by one; nothing else in the
archive is looked at.
"""

from __future__ import annotations

import json
import math
import operator
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dp_microadam.errors import InputError


def load_program(path: Path, *, trust: bool = False) -> Callable[..., Any]:
    """The program in a file, as a function of raw inputs.

    With ``trust`` it is loaded by ``torch.export.load``, which runs whatever code the file holds; without, only operators that
    networks are made of are run, and a file that needs more is refused.

    Raises:
        InputError: if it cannot be read.
    """
    if not trust:
        return AtenProgram(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.load(path).module()
        except Exception as error:
            raise InputError(
                f"{path} is not a program of torch.export that this torch reads ({type(error).__name__}); "
                "export it again with this version of torch"
            ) from None
    return torch.no_grad()(program)


_OPERATORS = """
    abs acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d add addcdiv addcmul addmm all alpha_dropout amax amin __and__ any arange argmax argmin argsort asin
    asinh _assert_scalar _assert_tensor_metadata atan2 atan atanh avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm
    bitwise_and bitwise_not bitwise_or bitwise_xor bmm broadcast_to bucketize cat ceil celu chunk clamp_max clamp_min clamp
    clone col2im constant_pad_nd contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d copy cos
    cosh cosine_similarity cumprod cumsum detach_copy detach diagonal diff div dot dropout einsum elu embedding eq erfc erf
    expand_as expand exp expm1 eye feature_dropout fill flatten flip floor_divide floor fmod frac full_like full gather ge
    gelu glu grid_sampler group_norm gru gt hardsigmoid hardswish hardtanh hstack im2col index_add index_copy index_put
    index_select index instance_norm isfinite isinf isnan layer_norm leaky_relu le lerp lift_fresh_copy linalg_vector_norm
    linear linspace log10 log1p log2 log_sigmoid log_softmax logaddexp logical_and logical_not logical_or logical_xor log
    logsumexp lstm lt masked_fill masked_scatter matmul max_pool1d max_pool2d max_pool3d maximum max mean meshgrid minimum min
    mish mm movedim mul multiply mv nan_to_num narrow neg ne new_full new_ones new_zeros nonzero norm numpy_T one_hot
    ones_like ones __or__ outer pad permute pixel_shuffle pixel_unshuffle polar pow prelu prod reciprocal relu6 relu remainder
    repeat_interleave repeat reshape rms_norm rnn_relu rnn_tanh roll round rrelu rsqrt rsub scalar_tensor
    scaled_dot_product_attention scatter_add scatter_reduce scatter select_scatter select selu sigmoid sign silu sinh sin
    slice_scatter slice softmax softplus softsign sort split_with_sizes split sqrt square squeeze stack std sub subtract sum
    sym_numel sym_size tanh tan tensor_split threshold tile _to_copy topk to transpose tril triu true_divide trunc t type_as
    unbind unflatten unfold _unsafe_view unsqueeze_copy unsqueeze _upsample_bicubic2d_aa upsample_bicubic2d
    _upsample_bilinear2d_aa upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact2d upsample_trilinear3d var_mean var view_as view vstack where __xor__ zeros_like zeros zero
""".split()  # noqa: SIM905
"""What networks compute with. Not all of aten: ``from_file`` and ``save`` write files, others trust what they are given."""

_ARITHMETIC = ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "eq", "ne", "ge", "gt", "le", "lt")
_ON_SIZES: Mapping[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in _ARITHMETIC},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    "torch.sym_min": min,
    "torch.sym_max": max,
    "torch.sym_float": float,
    "torch.sym_not": operator.not_,
}
_ATEN = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")

# The numbers of torch._export.serde.schema.
_DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 10: torch.complex64, 11: torch.complex128, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip
_MEMORY_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format}

_Values = dict[str, Any]
_Node = tuple[Callable[..., Any], dict[str, Callable[[_Values], Any]], list[Any]]


class _Refused(Exception):
    """What a program holds that is not run, in words that complete "FILE holds …"."""


class AtenProgram:
    """The program in a file, as a function of raw inputs.

    Formal guarantees: making and calling it runs operators of aten named in this file, and arithmetic on sizes; it reads
    ``path`` and no other file. A program may still take long, fill the memory, or return whatever its author likes.

    Raises:
        InputError: if it is no such program, or needs something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                root = archive.namelist()[0].partition("/")[0]
                module = json.loads(archive.read(f"{root}/models/model.json"))["graph_module"]
                tensors = _tensors(archive, f"{root}/data/constants/", "model_constants_config.json")
                tensors |= _tensors(archive, f"{root}/data/weights/", "model_weights_config.json")
            self._values, self._inputs = _bound(module["signature"]["input_specs"], tensors)
            self._output = _output(module)
            self._nodes = [_node(node) for node in module["graph"]["nodes"]]
        except _Refused as error:
            raise InputError(
                f"{path} holds {error}; if you trust its author with all that you may do on this machine, add --trust"
            ) from None
        except Exception as error:  # whatever a file can be
            raise InputError(
                f"{path} is not a program as torch.export writes it in torch 2.13 ({type(error).__name__}); export it again"
            ) from None

    def __call__(self, *inputs: Tensor) -> Any:
        values = {**self._values, **dict(zip(self._inputs, inputs, strict=True))}
        try:
            with torch.no_grad():
                for function, arguments, outputs in self._nodes:
                    given = {name: value(values) for name, value in arguments.items()}
                    aten = isinstance(function, torch._ops.OpOverload)
                    found = function(**given) if aten else function(*given.values())
                    for names, result in zip(outputs, (found,) if len(outputs) == 1 else found or (), strict=True):
                        values.update(zip(names, result, strict=True) if isinstance(names, list) else [(names, result)])
            return values[self._output]
        except Exception as error:
            raise InputError(
                f"{self._path} fails on inputs of shape {[list(one.shape) for one in inputs]} ({type(error).__name__}); give "
                "it inputs as its README.md describes them"
            ) from None


def _tensors(archive: zipfile.ZipFile, folder: str, config: str) -> dict[str, Tensor]:
    found = {}
    for name, entry in json.loads(archive.read(folder + config))["config"].items():
        if entry["use_pickle"] or entry["tensor_meta"] is None:
            raise _Refused(f"{name} as a pickle, which can be any code")
        meta = entry["tensor_meta"]
        content = bytearray(archive.read(folder + entry["path_name"]))
        flat = (
            torch.frombuffer(content, dtype=_DTYPES[meta["dtype"]]) if content else torch.empty(0, dtype=_DTYPES[meta["dtype"]])
        )
        sizes, strides = ([one["as_int"] for one in meta[key]] for key in ("sizes", "strides"))
        found[name] = flat.as_strided(sizes, strides, meta["storage_offset"]["as_int"])
    return found


def _bound(specs: list[Any], tensors: dict[str, Tensor]) -> tuple[_Values, list[str]]:
    """Weights by the names that nodes know them by, and the names of inputs."""
    values: _Values = {}
    inputs = []
    for spec in specs:
        ((kind, entry),) = spec.items()
        if kind == "user_input" and "as_tensor" in entry["arg"]:
            inputs.append(entry["arg"]["as_tensor"]["name"])
        elif kind in ("parameter", "buffer", "tensor_constant"):
            values[entry["arg"]["name"]] = tensors[entry[f"{kind}_name"]]
        else:
            raise _Refused(f"an input of kind {kind}")
    return values, inputs


def _output(module: Mapping[str, Any]) -> str:
    (spec,) = module["signature"]["output_specs"][:1] or [{}]
    structure = json.loads(module["module_call_graph"][0]["signature"]["out_spec"])[1]["type"]
    if len(module["signature"]["output_specs"]) != 1 or structure is not None or "as_tensor" not in spec["user_output"]["arg"]:
        raise _Refused("outputs other than one tensor")
    name: str = spec["user_output"]["arg"]["as_tensor"]["name"]
    return name


def _node(node: Mapping[str, Any]) -> _Node:
    arguments = {one["name"]: _argument(one["arg"]) for one in node["inputs"]}
    return _function(node["target"]), arguments, [_names(one) for one in node["outputs"]]


def _function(target: str) -> Callable[..., Any]:
    if target in _ON_SIZES:
        return _ON_SIZES[target]
    match = _ATEN.fullmatch(target)
    if match and (match[1] in _OPERATORS or match[1].removesuffix("_") in _OPERATORS):
        found = getattr(getattr(torch.ops.aten, match[1]), match[2])
        if isinstance(found, torch._ops.OpOverload):
            return found
    raise _Refused(f"the operator {target[:80]!r}, which is none that networks are known to need")


def _argument(argument: Mapping[str, Any]) -> Callable[[_Values], Any]:
    """What gives an argument's value, once those of earlier nodes are known."""
    ((kind, value),) = argument.items()
    if isinstance(value, list):
        if kind in ("as_ints", "as_bools", "as_strings", "as_floats"):
            return lambda _: value
        single = kind.removesuffix("s")
        parts = [_argument(one if single == "as_optional_tensor" else {single: one}) for one in value]
        return lambda values: [part(values) for part in parts]
    if kind in ("as_tensor", "as_sym_int", "as_sym_float", "as_sym_bool"):
        if (name := value.get("name", value.get("as_name"))) is not None:
            return lambda values: values[name]
        (value,) = value.values()
    elif kind == "as_optional_tensor":
        return _argument(value)
    elif kind == "as_none":
        value = None
    elif kind == "as_scalar_type":
        value = _DTYPES[value]
    elif kind == "as_memory_format":
        value = _MEMORY_FORMATS[value]
    elif kind == "as_layout":
        value = torch.strided
    elif kind == "as_device":
        value = torch.device("cpu")
    elif kind == "as_float":
        value = float(value)  # JSON has infinity as text
    elif kind not in ("as_int", "as_bool", "as_string"):
        raise _Refused(f"an argument of kind {kind[:80]!r}")
    return lambda _: value


def _names(output: Mapping[str, Any]) -> Any:
    ((kind, value),) = output.items()
    if kind == "as_tensors":
        return [one["name"] for one in value]
    return value["name"] if kind == "as_tensor" else value["as_name"]
