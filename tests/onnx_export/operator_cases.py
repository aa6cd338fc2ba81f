"""A table of small graphs, one per operator, attribute and opset that the importers know or refuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MS = "com.microsoft"


@dataclass
class Case:
    """A graph from x to y.

    Attributes:
        nodes: (operator, "inputs->outputs", attributes); `domain` among the attributes is the node's.
        x: shape of one sample. w: constants.
        lowest: entries of x are at least this.
        refused: what the error says, for a graph that is not loaded.
        batch: the declared batch, dynamic by default.
        linear: whether bounds must be attained, the graph being linear in x.
    """

    name: str
    nodes: list[tuple[str, str, dict[str, Any]]]
    x: tuple[int, ...] = (3, 4)
    w: dict[str, np.ndarray] = field(default_factory=dict)
    opset: int = 17
    lowest: float | None = None
    refused: str = ""
    batch: int | str = "b"
    linear: bool = False

    def save(self, folder: Path) -> Path:
        nodes = []
        for op, names, attributes in self.nodes:
            inputs, _, outputs = names.partition("->")
            given = [n if n != "-" else "" for n in inputs.split()]
            made = [n if n != "-" else "" for n in outputs.split()] or ["y"]
            nodes.append(helper.make_node(op, given, made, **attributes))
        info = helper.make_tensor_value_info("x", TensorProto.FLOAT, [self.batch, *self.x])
        out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        tensors = [numpy_helper.from_array(v, n) for n, v in self.w.items()]
        graph = helper.make_graph(nodes, "g", [info], [out], tensors)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MS, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8 if self.opset < 22 else 10)
        path = folder / "m.onnx"
        onnx.save(model, str(path))
        return path


def f(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def i(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def scalar(value: float) -> np.ndarray:
    return np.array(value, dtype=np.float32)


def one(op: str, names: str = "x", **attributes: Any) -> list[tuple[str, str, dict[str, Any]]]:
    return [(op, names, attributes)]


def _arithmetic() -> list[Case]:
    cases = []
    for op in ("Add", "Sub", "Mul", "Div"):
        for order in ("x c", "c x"):
            if (op, order) == ("Div", "c x"):
                cases.append(Case("Div c x", one(op, order), w={"c": f(1, 4)}, lowest=0.5))
                continue
            same = dict(linear=True)
            cases.append(Case(f"{op} {order}", one(op, order), w={"c": f(1, 4)}, **same))
            cases.append(Case(f"{op} {order} scalar", one(op, order), w={"c": scalar(-1.7)}, **same))
            cases.append(Case(f"{op} {order} with batch", one(op, order), w={"c": f(1, 1, 3, 1)}, **same))
            cases.append(
                Case(f"{op} {order} larger", one(op, order), x=(1, 4), w={"c": f(1, 1, 3, 4)}, **same)
            )
    pair = [("MatMul", "x w->h", {})]
    w = {"w": f(2, 4, 4)}
    for op in ("Add", "Sub", "Mul"):
        cases.append(Case(f"{op} of two", [*pair, (op, "x h", {})], w=w, linear=op != "Mul"))
    row = [("ReduceMean", "x->m", {"axes": [1], "keepdims": 1})]
    flat = [("ReduceMean", "x->m", {"axes": [1], "keepdims": 0})]
    for op in ("Add", "Sub", "Mul", "Max"):
        cases.append(Case(f"{op} broadcast", [*row, (op, "x m", {})], linear=op in ("Add", "Sub")))
        cases.append(Case(f"{op} broadcast left", [*row, (op, "m x", {})], linear=op in ("Add", "Sub")))
    cases += [
        Case("Mul of itself", one("Mul", "x x")),
        Case("Div of two", [("Exp", "x->e", {}), ("Div", "x e", {})]),
        Case("Div of rows", [("ReduceL2", "x->n", {"axes": [2]}), ("Div", "x n", {})], opset=13, lowest=0.5),
        Case("Div by zero", one("Div", "x c"), w={"c": scalar(0)}, refused="division by a constant zero"),
        Case("Add across the batch", [*flat, ("Add", "x m", {})], x=(2, 4), refused="influence"),
        Case("Neg", one("Neg"), linear=True),
        Case("Sum", one("Sum", "x c x d"), w={"c": f(1, 4), "d": f(2, 3, 1)}, linear=True),
        Case("Mean", one("Mean", "x c x"), w={"c": f(1, 4)}, linear=True),
        Case("Max", one("Max", "x c"), w={"c": f(1, 4)}),
        Case("Max of three", [*pair, ("Max", "x h c", {})], w={**w, "c": f(3, 1)}),
        Case("Min", one("Min", "x c"), w={"c": f(1, 3, 1)}),
        Case("Min of two", [*pair, ("Min", "x h", {})], w=w),
        Case("Clip attributes", one("Clip", min=-0.5, max=0.25), opset=10),
        Case("Clip inputs", one("Clip", "x lo hi"), w={"lo": scalar(-0.5), "hi": scalar(0.25)}),
        Case("Clip above only", one("Clip", "x - hi"), w={"hi": scalar(0.25)}),
        Case("Relu6", one("Clip", "x lo hi"), w={"lo": scalar(0), "hi": scalar(6)}, opset=11),
        Case("Clip crossed", one("Clip", "x lo hi"), w={"lo": scalar(1), "hi": scalar(-1)}),
        Case("Where", one("Where", "k x c"), w={"k": np.array([True, False, True, True]), "c": f(1, 4)}),
        Case("Where swapped", one("Where", "k c x"), w={"k": f(1, 3, 4) > 0, "c": scalar(-1e4)}),
        Case("Where of two", [*pair, ("Where", "k x h", {})], w={**w, "k": f(3, 3, 1) > 0}, linear=True),
        Case("Where by data", [("Greater", "x c->k", {}), ("Where", "k x c", {})], w={"c": f(1, 4)},
             refused="Greater"),
        Case("-inf before softmax", [("Add", "x c->s", {}), ("Softmax", "s", {"axis": -1})],
             w={"c": np.array([0, -np.inf, 0, 0], np.float32)}),
        Case("-inf elsewhere", one("Add", "x c"), w={"c": np.array([0, -np.inf, 0, 0], np.float32)},
             refused="argument of a softmax"),
    ]  # fmt: skip
    for p in (1.0, 2.0, 3.0, 4.0):
        cases.append(Case(f"Pow {p:g}", one("Pow", "x p"), w={"p": scalar(p)}))
    for p in (0.5, -0.5, -1.0, -2.0):
        cases.append(Case(f"Pow {p:g}", one("Pow", "x p"), w={"p": scalar(p)}, lowest=0.5))
    cases += [
        Case("Pow of integers", one("Pow", "x p"), w={"p": np.array(2)}, opset=13),
        Case("Pow row of exponents", one("Pow", "x p"), w={"p": np.full(4, 2, np.float32)}),
        Case("Pow 2.5", one("Pow", "x p"), w={"p": scalar(2.5)}, lowest=0.5, refused="exponent 2.5"),
        Case("Pow different", one("Pow", "x p"), w={"p": np.array([1, 2, 3, 4], np.float32)},
             refused="several exponents"),
        Case("Pow of a constant", one("Pow", "c x"), w={"c": scalar(2)}, refused="exponent depends"),
    ]  # fmt: skip
    return cases


def _activations() -> list[Case]:
    plain = ("Relu", "Tanh", "Sigmoid", "Abs", "Exp", "Erf", "Softplus", "Softsign", "HardSwish", "Selu")
    cases = [Case(op, one(op)) for op in (*plain, "HardSigmoid", "Elu", "LeakyRelu")]
    cases += [Case(op, one(op), lowest=0.3) for op in ("Sqrt", "Log", "Reciprocal")]
    cases += [
        Case("Elu attributes", one("Elu", alpha=0.3)),
        Case("Celu", one("Celu", alpha=0.7)),
        Case("Celu default", one("Celu")),
        Case("Selu attributes", one("Selu", alpha=1.2, gamma=0.8)),
        Case("HardSigmoid attributes", one("HardSigmoid", alpha=0.4, beta=0.3)),
        Case("LeakyRelu steep", one("LeakyRelu", alpha=1.5)),
        Case("LeakyRelu negative", one("LeakyRelu", alpha=-0.5)),
        Case("PRelu", one("PRelu", "x s"), w={"s": f(1, 4)}),
        Case("PRelu channels", one("PRelu", "x s"), x=(2, 3, 3), w={"s": f(1, 2, 1, 1)}),
        Case("ThresholdedRelu", one("ThresholdedRelu"), refused="ThresholdedRelu"),
        Case("Gelu 20", one("Gelu"), opset=20),
        Case("Gelu 20 tanh", one("Gelu", approximate="tanh"), opset=20),
        Case("Gelu onnxruntime", one("Gelu", domain=MS)),
        Case("BiasGelu", one("BiasGelu", "x c", domain=MS), w={"c": f(1, 4)}),
        Case("FastGelu", one("FastGelu", domain=MS)),
        Case("FastGelu bias", one("FastGelu", "x c", domain=MS), w={"c": f(1, 4)}),
        Case("QuickGelu", one("QuickGelu", domain=MS)),
        Case("QuickGelu 1", one("QuickGelu", alpha=1.0, domain=MS)),
        Case("QuickGelu 0.8", one("QuickGelu", alpha=0.8, domain=MS)),
        Case("SiLU", [("Sigmoid", "x->s", {}), ("Mul", "x s", {})]),
        Case("Swish", one("Swish"), opset=24),
        Case("Swish 0.5", one("Swish", alpha=0.5), opset=24),
        Case("Mish", one("Mish"), opset=18, refused="Mish"),
        Case("Sin", one("Sin"), refused="Sin"),
    ]
    for opset in (9, 11, 13):
        for axis in (None, 1, 2, -1):
            given = {} if axis is None else {"axis": axis}
            for op in ("Softmax", "LogSoftmax"):
                cases.append(Case(f"{op} {opset} {axis}", one(op, **given), opset=opset))
    return cases


def _linear() -> list[Case]:
    cases = []
    for name, x, a, b in (
        ("right", (3, 4), "x", f(1, 4, 5)),
        ("right of a row", (4,), "x", f(1, 4, 5)),
        ("right with ones", (2, 3, 4), "x", f(1, 1, 4, 5)),
        ("right batched", (2, 3, 4), "x", f(1, 2, 4, 5)),
        ("right batched with batch", (2, 3, 4), "x", f(1, 1, 2, 4, 5)),
        ("right batched larger", (1, 3, 4), "x", f(1, 2, 4, 5)),
        ("right of higher rank", (3, 4), "x", f(1, 2, 1, 4, 5)),
        ("right vector", (3, 4), "x", f(1, 4)),
        ("left", (3, 4), "c", f(1, 5, 3)),
        ("left batched", (2, 3, 4), "c", f(1, 2, 5, 3)),
        ("left batched with batch", (2, 3, 4), "c", f(1, 1, 2, 5, 3)),
        ("left vector", (3, 4), "c", f(1, 3)),
    ):
        names = "x c" if a == "x" else "c x"
        cases.append(Case(f"MatMul {name}", one("MatMul", names), x=x, w={"c": b}, linear=True))
    turned = ("Transpose", "x->t", {"perm": [0, 2, 1]})
    gemms = [
        ("", "x w c", {}, {"w": f(1, 4, 5), "c": f(2, 5)}),
        (" no bias", "x w", {}, {"w": f(1, 4, 5)}),
        (" transB", "x w c", {"transB": 1, "alpha": 0.5, "beta": -2.0}, {"w": f(1, 5, 4), "c": f(2, 1, 5)}),
        (" scalar bias", "x w c", {}, {"w": f(1, 4, 5), "c": scalar(0.7)}),
    ]
    cases += [Case(f"Gemm{n}", one("Gemm", names, **a), x=(4,), w=w, linear=True) for n, names, a, w in gemms]
    whole = ("Squeeze", "x axes->q", {})
    axes = {"axes": i(0)}
    cases += [
        Case("MatMul of two", [turned, ("MatMul", "x t", {})]),
        Case("MatMul of two broadcast", [turned, ("Unsqueeze", "x a->u", {}), ("MatMul", "u t", {})],
             x=(2, 2), w={"a": i(2)}, refused="influence"),
        Case("MatMul left without batch", one("MatMul", "c x"), x=(4,), w={"c": f(1, 4, 1)}, linear=True),
        Case("Gemm transA", [whole, ("Gemm", "q w", {"transA": 1})], batch=1, w={**axes, "w": f(1, 3, 5)},
             linear=True),
        Case("Gemm constant left", [whole, ("Gemm", "w q c", {})], batch=1,
             w={**axes, "w": f(1, 5, 3), "c": f(2, 5, 1)}, linear=True),
        Case("Gemm of two", [whole, ("Gemm", "q q c", {"transB": 1, "alpha": 0.5})], batch=1,
             w={**axes, "c": f(2, 3, 3)}),
        Case("Gemm data bias", [whole, ("Gemm", "w q q", {"beta": 0.5})], batch=1,
             w={**axes, "w": f(1, 3, 3)}, linear=True),
        Case("FusedMatMul", [("FusedMatMul", "x x", {"transB": 1, "alpha": 0.5, "domain": MS})]),
        Case("FusedMatMul constant", one("FusedMatMul", "x c", transB=1, alpha=2.0, domain=MS),
             w={"c": f(1, 5, 4)}, linear=True),
        Case("FusedGemm", one("FusedGemm", "x w c", activation="Tanh", transB=1, alpha=0.5, domain=MS),
             x=(4,), w={"w": f(1, 3, 4), "c": f(2, 3)}),
    ]  # fmt: skip
    for equation, x, w in (
        ("bnd,de->bne", (3, 4), f(1, 4, 5)),
        ("...d,de->...e", (3, 4), f(1, 4, 5)),
        ("bhnd,hde->bnhe", (2, 3, 4), f(1, 2, 4, 5)),
        ("bnd,hde->bhne", (3, 4), f(1, 2, 4, 5)),
        ("bnhd,hde->bne", (3, 2, 4), f(1, 2, 4, 5)),
        ("bnd,nm->bmd", (3, 4), f(1, 3, 5)),
        ("bnd,d->bn", (3, 4), f(1, 4)),
        ("bnd,de", (3, 4), f(1, 4, 5)),
    ):
        cases.append(Case(f"Einsum {equation}", one("Einsum", "x c", equation=equation), x=x, w={"c": w},
                          linear=True))  # fmt: skip
    cases += [
        Case("Einsum constant left", one("Einsum", "c x", equation="ed,bnd->bne"), w={"c": f(1, 5, 4)},
             linear=True),
        Case("Einsum scores", one("Einsum", "x x", equation="bhnd,bhmd->bhnm"), x=(2, 3, 4)),
        Case("Einsum scores of tokens", one("Einsum", "x x", equation="bnhd,bmhd->bhnm"), x=(3, 2, 4)),
        Case("Einsum transpose", one("Einsum", "x", equation="bnd->bdn"), linear=True),
        Case("Einsum sum", one("Einsum", "x", equation="bnd->bd"), linear=True),
        Case("Einsum diagonal", one("Einsum", "x", equation="bnn->bn"), x=(3, 3), refused="bnn"),
        Case("Einsum mixes the batch", one("Einsum", "x x", equation="bnd,cnd->bc"), refused="batch"),
    ]  # fmt: skip
    return cases


def _convolutions() -> list[Case]:
    image = (2, 5, 6)
    w, c = f(1, 3, 2, 2, 3), f(2, 3)
    cases = [
        Case(f"Conv {name}", one("Conv", "x w c", **a), x=image, w={"w": w, "c": c}, linear=True)
        for name, a in (
            ("", {}),
            ("pads", {"pads": [1, 1, 1, 1]}),
            ("uneven pads", {"pads": [0, 2, 1, 0]}),
            ("uneven pads and strides", {"pads": [2, 0, 1, 1], "strides": [2, 2]}),
            ("uneven pads and dilations", {"pads": [1, 0, 0, 2], "dilations": [2, 2]}),
            ("same upper", {"auto_pad": "SAME_UPPER", "strides": [2, 1]}),
            ("same lower", {"auto_pad": "SAME_LOWER", "strides": [1, 2]}),
            ("valid", {"auto_pad": "VALID", "strides": [2, 2]}),
        )
    ]
    cases += [
        Case("Conv no bias", one("Conv", "x w"), x=image, w={"w": w}, linear=True),
        Case("Conv groups", one("Conv", "x w", group=2), x=image, w={"w": f(1, 4, 1, 2, 2)}, linear=True),
        Case("Conv 1d", one("Conv", "x w c", pads=[1, 0]), x=(2, 7), w={"w": f(1, 3, 2, 3), "c": c},
             linear=True),
        Case("Conv 3d", one("Conv", "x w"), x=(1, 3, 3, 3), w={"w": f(1, 2, 1, 2, 2, 2)}, refused="3 dim"),
        Case("AveragePool", one("AveragePool", kernel_shape=[2, 2], strides=[2, 2]), x=(2, 4, 4),
             linear=True),
        Case("AveragePool counts", one("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1],
             count_include_pad=1), x=(2, 4, 4), linear=True),
        Case("AveragePool does not count", one("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
             x=(2, 4, 4), refused="several sizes"),
        Case("GlobalAveragePool", one("GlobalAveragePool"), x=(2, 4, 4), linear=True),
        Case("MaxPool", one("MaxPool", kernel_shape=[2, 2]), x=(2, 4, 4), refused="MaxPool"),
    ]  # fmt: skip
    return cases


def _normalisations() -> list[Case]:
    cases = []
    for x in ((3,), (3, 4), (3, 2, 4)):
        w = {"s": f(1, 3), "c": f(2, 3), "m": f(3, 3), "v": np.abs(f(4, 3)) + 0.1}
        for opset in (7, 9, 14, 17):
            if x == (3,) or opset in (7, 17):
                cases.append(
                    Case(f"BatchNorm {len(x) + 1} {opset}",
                         one("BatchNormalization", "x s c m v", epsilon=0.01), x=x, w=w, opset=opset,
                         linear=True)
                )  # fmt: skip
    for name, names, a in (
        ("", "x s c", {}),
        (" no bias", "x s", {}),
        (" axis", "x t d", {"axis": 1}),
        (" axis -2", "x t d", {"axis": -2, "epsilon": 0.1}),
    ):
        w = {"s": f(1, 4), "c": f(2, 4), "t": f(1, 3, 4), "d": f(2, 3, 4)}
        used = {n: v for n, v in w.items() if n in names.split()}
        cases.append(Case(f"LayerNorm{name}", one("LayerNormalization", names, **a), w=used))
        if "no bias" not in name:
            rms = " ".join(names.split()[:2])
            own = {n: v for n, v in w.items() if n in rms.split()}
            cases.append(Case(f"RMSNorm{name}", one("RMSNormalization", rms, **a), w=own, opset=23))
            cases.append(
                Case(f"SimplifiedLayerNorm{name}", one("SimplifiedLayerNormalization", rms, **a), w=own)
            )
    skip = {"s": f(1, 4), "c": f(2, 4), "d": f(3, 4), "k": f(4, 4, 4)}
    product = ("MatMul", "x k->h", {})
    cases += [
        Case("SkipLayerNorm", [product, ("SkipLayerNormalization", "x h s c d", {"domain": MS})], w=skip),
        Case("SkipLayerNorm sum", [product, ("SkipLayerNormalization", "x h s c d->n - - z",
             {"domain": MS, "epsilon": 1e-3}), ("Add", "n z", {})], w=skip),
        Case("SkipSimplified", [product, ("SkipSimplifiedLayerNormalization", "x h s d",
             {"domain": MS, "epsilon": 1e-3})], w={n: v for n, v in skip.items() if n != "c"}),
        Case("SkipSimplified sum", [product, ("SkipSimplifiedLayerNormalization", "x h s->n - - z",
             {"domain": MS}), ("Mul", "n z", {})], w={n: v for n, v in skip.items() if n in "sk"}),
        Case("InstanceNorm", one("InstanceNormalization", "x s c"), w={"s": f(1, 3), "c": f(2, 3)}),
        Case("GroupNorm", one("GroupNormalization", "x s c", num_groups=2), x=(4, 3),
             w={"s": f(1, 4), "c": f(2, 4)}, opset=21),
    ]  # fmt: skip
    return cases


def _reductions() -> list[Case]:
    cases = []
    for op in ("Mean", "Sum", "Max", "Min", "L1", "L2", "SumSquare", "LogSumExp"):
        linear = op in ("Mean", "Sum")
        low = 0.3 if op == "L2" else None
        for keep in (0, 1):
            for axes in ([1], [-1], [1, 2]):
                same = {"linear": linear, "lowest": low}
                name = f"Reduce{op} {axes} {keep}"
                if keep or axes == [1]:
                    cases.append(
                        Case(name, one(f"Reduce{op}", axes=axes, keepdims=keep), opset=11, **same)  # type: ignore[arg-type]
                    )
        cases.append(
            Case(
                f"Reduce{op} 18",
                one(f"Reduce{op}", "x a"),
                w={"a": i(2)},
                opset=18,
                linear=linear,
                lowest=low,
            )
        )
    cases += [
        Case("ReduceSum noop", one("ReduceSum", noop_with_empty_axes=1), opset=13, linear=True),
        Case("ReduceMean of all", one("ReduceMean", keepdims=0), refused="influence each other"),
        Case("ReduceMean batch", one("ReduceMean", axes=[0]), refused="influence each other"),
        Case("ReduceMax of five", one("ReduceMax", axes=[2]), x=(2, 5)),
        Case("ReduceProd", one("ReduceProd", axes=[2]), refused="ReduceProd"),
        Case("CumSum", one("CumSum", "x a"), w={"a": np.array(1)}, linear=True),
        Case(
            "CumSum reverse", one("CumSum", "x a", reverse=1, exclusive=1), w={"a": np.array(-1)}, linear=True
        ),
    ]
    return cases


def _shapes() -> list[Case]:
    def case(name: str, op: str, names: str, x: tuple[int, ...] = (3, 4), **kw: Any) -> Case:
        own = {n: kw.pop(n) for n in ("opset", "refused", "batch", "w") if n in kw}
        return Case(name, one(op, names, **kw), x=x, linear=not own.get("refused"), **own)

    cases = [
        case("Reshape", "Reshape", "x s", w={"s": i(0, 2, -1)}),
        case("Reshape merges heads", "Reshape", "x s", w={"s": i(-1, 4)}),
        case("Flatten", "Flatten", "x", (3, 2, 2)),
        case("Flatten 2", "Flatten", "x", (3, 2, 2), axis=2),
        case("Flatten 0", "Flatten", "x", axis=0),
        case("Squeeze 11", "Squeeze", "x", (3, 1, 4), axes=[2], opset=11),
        case("Squeeze 13", "Squeeze", "x a", (3, 1, 4), w={"a": i(-2)}),
        case("Unsqueeze 11", "Unsqueeze", "x", axes=[1, 3], opset=11),
        case("Unsqueeze 13", "Unsqueeze", "x a", w={"a": i(-1)}),
        case("Transpose", "Transpose", "x", (2, 3, 4), perm=[0, 3, 1, 2]),
        case("Transpose moves the batch", "Transpose", "x", (3, 4), perm=[1, 0, 2]),
        case("Expand", "Expand", "x s", (3, 1), w={"s": i(1, 3, 4)}),
        case("Expand rank", "Expand", "x s", (3, 4), w={"s": i(2, 1, 3, 4)}),
        case("Tile", "Tile", "x r", w={"r": i(1, 2, 3)}),
        case("Split attribute", "Split", "x->y z", axis=2, split=[1, 3], opset=11),
        case("Split even", "Split", "x->z y", axis=-1, opset=13),
        case("Split uneven", "Split", "x s->z y", axis=1, w={"s": i(1, 2)}),
        case("Split num_outputs", "Split", "x->z y", (5, 2), axis=1, num_outputs=2, opset=18),
        case("Slice 9", "Slice", "x", starts=[1], ends=[3], axes=[2], opset=9),
        case("Slice", "Slice", "x b e a", w={"b": i(0, 1), "e": i(2, 2**62), "a": i(1, 2)}),
        case("Slice steps", "Slice", "x b e a t", w={"b": i(-1), "e": i(-(2**62)), "a": i(2), "t": i(-2)}),
        case("Slice no axes", "Slice", "x b e", w={"b": i(0, 1, 0), "e": i(9, 3, -1)}),
        case("Slice empty", "Slice", "x b e a", w={"b": i(2), "e": i(1), "a": i(1)}, refused="size 0"),
        case("Gather scalar", "Gather", "x n", axis=1, w={"n": np.array(-1)}),
        case("Gather vector", "Gather", "x n", axis=2, w={"n": i(3, 0, 0)}),
        case("Gather matrix", "Gather", "x n", axis=1, w={"n": np.array([[0, 2], [1, 1]])}),
        case(
            "Gather out of range", "Gather", "x n", axis=1, w={"n": i(3)}, refused="out of range|onnxruntime"
        ),
        case("GatherND", "GatherND", "x n", batch_dims=1, w={"n": np.array([[2]])}, batch=1),
        case(
            "GatherElements",
            "GatherElements",
            "x n",
            axis=2,
            batch=1,
            w={"n": np.array([[[0, 3], [1, 2], [3, 3]]])},
        ),
        case("DepthToSpace", "DepthToSpace", "x", (8, 2, 2), blocksize=2),
        case("SpaceToDepth", "SpaceToDepth", "x", (2, 4, 4), blocksize=2),
        case("Pad 2", "Pad", "x", pads=[0, 1, 0, 0, 0, 2], value=0.5, opset=10),
        case("Pad", "Pad", "x p v", w={"p": i(0, 0, 1, 0, 2, 0), "v": scalar(-1.5)}),
        case("Pad zeros", "Pad", "x p", w={"p": i(0, 0, 1, 0, 2, 0)}),
        case("Pad axes", "Pad", "x p v a", w={"p": i(1, 2), "v": scalar(2), "a": i(2)}, opset=18),
        case("Pad reflect", "Pad", "x p", w={"p": i(0, 1, 0, 0, 0, 2)}, mode="reflect"),
        case("Pad cuts", "Pad", "x p", w={"p": i(0, -1, 0, 0, 0, 1)}),
        case("Trilu", "Trilu", "x"),
        case("Trilu lower", "Trilu", "x k", w={"k": np.array(1)}, upper=0),
        case("Concat", "Concat", "x x", axis=1),
        case(
            "Concat constants", "Concat", "c x d", axis=2, w={"c": f(1, 1, 3, 1), "d": f(2, 1, 3, 2)}, batch=1
        ),
        case("Concat batch", "Concat", "x x", axis=0),
        case("Identity", "Identity", "x"),
        case("Dropout", "Dropout", "x", ratio=0.5, opset=7),
        case("Dropout 13", "Dropout", "x r t", w={"r": scalar(0.5), "t": np.array(False)}, opset=13),
        case(
            "Dropout training",
            "Dropout",
            "x r t",
            w={"r": scalar(0.5), "t": np.array(True)},
            refused="training",
        ),
        case("Cast", "Cast", "x", to=1),
    ]
    product = ("MatMul", "x c->h", {})
    cases += [
        Case("Cast to double and back", [("Cast", "x->d", {"to": 11}), ("Cast", "d", {"to": 1})],
             linear=True),
        Case("Cast to integers", [("Cast", "x->d", {"to": 7}), ("Cast", "d", {"to": 1})],
             refused="cast of data"),
        Case("Shape arithmetic", [
            ("Shape", "x->s", {}), ("Gather", "s zero->b", {}), ("Unsqueeze", "b zeros->b1", {}),
            ("Concat", "b1 rest->t", {"axis": 0}), ("Reshape", "x t", {}),
        ], w={"zero": np.array(0), "zeros": i(0), "rest": i(2, 6)}, linear=True),
        Case("Range and ConstantOfShape", [
            ("Range", "a b c->r", {}), ("Cast", "r->q", {"to": 1}),
            ("ConstantOfShape", "s->o", {"value": numpy_helper.from_array(np.array([2], np.float32))}),
            ("Mul", "q o->p", {}), ("CumSum", "p zero->z", {}), ("Add", "x z", {}),
        ], w={"a": np.array(0), "b": np.array(4), "c": np.array(1), "s": i(4), "zero": np.array(0)},
             linear=True),
        Case("NonZero and Equal", [
            ("Equal", "k three->e", {}), ("NonZero", "e->n", {}), ("Squeeze", "n zeros->m", {}),
            ("Gather", "x m", {"axis": 2}),
        ], w={"k": i(3, 1, 3, 2), "three": np.array(3), "zeros": i(0)}, linear=True),
        Case("Sequence first", [
            ("Transpose", "x->t", {"perm": [1, 0, 2]}), ("Gather", "t zero->q", {"axis": 0}),
            ("MatMul", "q c", {}),
        ], w={"zero": np.array(0), "c": f(1, 4, 2)}, linear=True),
        Case("Heads merged into the batch", [
            ("Reshape", "x s->r", {}), ("Transpose", "r->t", {"perm": [0, 2, 1]}), ("MatMul", "r t->m", {}),
            ("Reshape", "m u", {}),
        ], x=(3, 2, 4), w={"s": i(-1, 2, 4), "u": i(-1, 3, 2, 2)}),
        Case("Random", [("RandomNormal", "->r", {"shape": [4]}), ("Add", "x r", {})], refused="Random"),
        Case("Two outputs of Dropout", [("Dropout", "x->z m", {}), ("Cast", "m->n", {"to": 1}),
             ("Mul", "z n", {})], refused=""),
        Case("Unused weight", [product, ("Relu", "h", {})], w={"c": f(1, 4, 3), "other": f(2, 3)}),
    ]  # fmt: skip
    return cases


CASES = [
    *_arithmetic(),
    *_activations(),
    *_linear(),
    *_convolutions(),
    *_normalisations(),
    *_reductions(),
    *_shapes(),
]
