"""The one module that imports auto_LiRPA; what differs between its versions is settled here.

Known to work: 0.3 (the newest on PyPI, the default set-up) and 0.7.x (its git repository). Attributes are
resolved on first use, so `import attn_bounds` and the mathematics work without auto_LiRPA.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch

HOW_TO_GET_IT = (
    "attn-bounds needs auto_LiRPA for this. Get it with one of\n"
    "  pip install --no-deps auto_LiRPA==0.3      (PyPI)\n"
    "  pip install --no-deps git+https://github.com/Verified-Intelligence/auto_LiRPA.git   (0.7.1 or newer)\n"
    "  make venv LIRPA=PATH                       (a checkout of yours)\n"
    "--no-deps because its own pins contradict a current torch; what it imports comes with attn-bounds."
)

# Options that every graph of ours needs; see operators/ for why. `softmax` is stock 0.7.1's own relaxation.
OPTIONS: dict[str, Any] = {
    "conv_mode": "matrix",  # operators of ours take tensors, not Patches
    "sparse_intermediate_bounds": False,
    "sparse_features_alpha": False,
    "sparse_spec_alpha": False,
    "fixed_reducemax_index": True,
}
STOCK_OPTIMIZE: dict[str, Any] = {"iteration": 20}  # the rest as auto_LiRPA ships it
OPTIMIZE: dict[str, Any] = {"iteration": 20, "lr_alpha": 0.05, "keep_best": True, "early_stop_patience": 10}

_NAMES = {
    "BoundedModule": "auto_LiRPA",
    "BoundedTensor": "auto_LiRPA",
    "PerturbationLpNorm": "auto_LiRPA.perturbations",
    "LinearBound": "auto_LiRPA.linear_bound",
    "Interval": "auto_LiRPA.bound_ops",
    "Bound": "auto_LiRPA.bound_ops",
    "BoundOptimizableActivation": "auto_LiRPA.bound_ops",
    "BoundSoftmax": "auto_LiRPA.bound_ops",
    "BoundReduceMax": "auto_LiRPA.bound_ops",
    "BoundInput": "auto_LiRPA.bound_ops",
    "BoundLinear": "auto_LiRPA.bound_ops",
    "BoundMatMul": "auto_LiRPA.bound_ops",
    "BoundConv": "auto_LiRPA.bound_ops",
    "BoundDiv": "auto_LiRPA.bound_ops",
    "BoundReshape": "auto_LiRPA.bound_ops",
    "BoundTranspose": "auto_LiRPA.bound_ops",
}
_package: types.ModuleType | None = None


def _exporter_globals() -> Any:
    for name in ("torch.onnx._internal.torchscript_exporter._globals", "torch.onnx._globals"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).GLOBALS
    raise ImportError("this torch has no TorchScript exporter, which auto_LiRPA traces models with")


def _supply_what_0_3_misses() -> None:
    """Names that 0.3 imports and that newer torch and numpy no longer have; nothing existing is replaced."""
    import numpy
    import torch.onnx.symbolic_helper as symbolic

    if "numpy.lib.arraysetops" not in sys.modules and not hasattr(numpy.lib, "arraysetops"):
        shim = types.ModuleType("numpy.lib.arraysetops")
        shim.isin = numpy.isin  # type: ignore[attr-defined]
        sys.modules[shim.__name__] = shim
        numpy.lib.arraysetops = shim  # type: ignore[attr-defined]
    if not hasattr(symbolic, "_set_opset_version"):
        exporter = _exporter_globals()

        def set_opset_version(version: int) -> None:
            exporter.export_onnx_opset_version = version

        symbolic._set_opset_version = set_opset_version  # type: ignore[attr-defined]
    if not hasattr(torch._C.Node, "__getitem__") and hasattr(symbolic, "_node_get"):
        torch._C.Node.__getitem__ = symbolic._node_get  # type: ignore[method-assign]
    if not hasattr(torch, "_six"):
        six = types.ModuleType("torch._six")
        six.string_classes = (str, bytes)  # type: ignore[attr-defined]
        sys.modules[six.__name__] = six
        torch._six = six  # type: ignore[attr-defined]


def _accept_remove_duplicate(module: Any) -> None:
    """torch calls `_named_members(…, remove_duplicate=…)`, which 0.3 does not take."""
    original = module._named_members
    if "remove_duplicate" in original.__code__.co_varnames:
        return

    def named_members(
        self: Any, get: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Any:
        return original(self, get, prefix, recurse)

    module._named_members = named_members


def _buffers_are_constants(buffers: Any) -> None:
    """0.3 takes buffers for inputs with a batch dimension: bounds of a batch then mix the samples."""
    original = buffers.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.from_input = False

    buffers.__init__ = init


def _constant_factors_in_forward_mode(mul: Any) -> None:
    """0.3 has no forward mode for products with a constant."""
    original = mul.bound_forward

    def bound_forward(self: Any, dim_in: int, x: Any, y: Any) -> Any:
        if not self.is_constant_op:
            return original(self, dim_in, x, y)
        constant = 1 if self.inputs[0].perturbed else 0
        node, bound = self.inputs[constant], (y, x)[constant]
        value = node.forward_value if getattr(node, "forward_value", None) is not None else node.value
        value = torch.as_tensor(value).to(bound.lb)
        up, down = value.clamp(min=0.0), value.clamp(max=0.0)
        # coefficients have a dimension behind the batch, which the constant may have too
        up_w, down_w = (t.unsqueeze(1) if t.ndim == bound.lb.ndim else t for t in (up, down))
        linear = importlib.import_module("auto_LiRPA.linear_bound").LinearBound
        return linear(
            up_w * bound.lw + down_w * bound.uw,
            up * bound.lb + down * bound.ub,
            up_w * bound.uw + down_w * bound.lw,
            up * bound.ub + down * bound.lb,
        )

    mul.bound_forward = bound_forward


def _bounds_in_forward_mode(module: Any) -> None:
    """0.3 returns None for the bounds of a node that it has passed through on the way to another one."""
    original = module.forward_general

    def forward_general(
        self: Any, C: Any = None, node: Any = None, concretize: bool = False, offset: int = 0
    ) -> Any:
        linear = getattr(node, "linear", None)
        if concretize and C is None and linear is not None and linear.lower is None:
            del node.linear
        return original(self, C=C, node=node, concretize=concretize, offset=offset)

    module.forward_general = forward_general


def package() -> types.ModuleType:
    """auto_LiRPA, imported on the first call.

    Raises:
        ImportError: it is absent or broken; the message says how to get it.
    """
    global _package
    if _package is None:
        with warnings.catch_warnings():
            # a filter is not enough: auto_LiRPA sets its own while it is imported
            warnings.showwarning = lambda *args, **kwargs: None
            root = logging.getLogger()
            handlers, level = list(root.handlers), root.level
            try:
                _supply_what_0_3_misses()
                _package = importlib.import_module("auto_LiRPA")
                _accept_remove_duplicate(_package.BoundedModule)
                ops = importlib.import_module("auto_LiRPA.bound_ops")
                if is_old():
                    _buffers_are_constants(ops.BoundBuffers)
                    _constant_factors_in_forward_mode(ops.BoundMul)
                    _bounds_in_forward_mode(_package.BoundedModule)
            except Exception as e:
                _package = None
                raise ImportError(f"{HOW_TO_GET_IT}\n(importing it failed: {type(e).__name__}: {e})") from e
            finally:
                # it configures the root logger, which would make every other library talk
                root.handlers[:] = handlers
                root.setLevel(level)
    return _package


def version() -> str:
    """Version string of auto_LiRPA."""
    return str(package().__version__)


def is_old() -> bool:
    """Whether this is 0.3 or older, with the old names."""
    return tuple(int(p) for p in version().split(".")[:2]) < (0, 4)


def interm_bounds_argument() -> str:
    """Name of the argument of `compute_bounds` that takes intermediate bounds."""
    return "intermediate_layer_bounds" if is_old() else "interm_bounds"


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(name)
    package()
    return getattr(importlib.import_module(_NAMES[name]), name)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Pin torch's global exporter state while auto_LiRPA traces, and give it back afterwards.

    One `torch.onnx.export(opset_version=17)` anywhere in the process would otherwise change the graph.
    """
    exporter = _exporter_globals()
    names = ("export_onnx_opset_version", "autograd_inlining", "operator_export_type", "training_mode")
    saved = {n: getattr(exporter, n) for n in names if hasattr(exporter, n)}
    constants = importlib.import_module("torch.onnx._constants")
    exporter.export_onnx_opset_version = 12 if is_old() else constants.ONNX_DEFAULT_OPSET
    if "autograd_inlining" in saved:
        exporter.autograd_inlining = False  # otherwise the operators of ours are replaced by their contents
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for n, value in saved.items():
            setattr(exporter, n, value)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """auto_LiRPA creates identity matrices in torch's default dtype; make that the model's for a while."""
    saved = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(saved)


def perturbation(norm: float, eps: Any, lower: Any = None, upper: Any = None) -> Any:
    """`PerturbationLpNorm` for an lp ball, or for the box [lower, upper] with norm=inf."""
    cls = __getattr__("PerturbationLpNorm")
    if lower is None:
        return cls(norm=norm, eps=eps)
    return cls(norm=norm, x_L=lower, x_U=upper)
