"""Small models that `fuzz_onnx.py` damages, besides the bundled one."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper, parser

SMALL = {
    "block": """<ir_version: 8, opset_import: ["" : 17]> g (float[b,4,6] x) => (float[b,3] y) <
        float[6,18] wqkv,
        float[6] gain, float[6] bias, float[6,12] w1, float[12] b1, float[12,6] w2, float[6,3] head,
        int64[4] s, int64[3] r, float d = {1.7320508}> {
        n = LayerNormalization <axis: int = -1, epsilon: float = 0.00001> (x, gain, bias)
        qkv = MatMul (n, wqkv)
        q, k, v = Split <axis: int = 2> (qkv)
        q1 = Reshape (q, s)
        k1 = Reshape (k, s)
        v1 = Reshape (v, s)
        qt = Transpose <perm: ints = [0, 2, 1, 3]> (q1)
        kt = Transpose <perm: ints = [0, 2, 3, 1]> (k1)
        vt = Transpose <perm: ints = [0, 2, 1, 3]> (v1)
        scores = MatMul (qt, kt)
        scaled = Div (scores, d)
        p = Softmax <axis: int = -1> (scaled)
        o = MatMul (p, vt)
        ot = Transpose <perm: ints = [0, 2, 1, 3]> (o)
        o1 = Reshape (ot, r)
        res = Add (x, o1)
        h = MatMul (res, w1)
        hb = Add (h, b1)
        e = Erf (hb)
        one = Constant <value_float: float = 1.0> ()
        half = Constant <value_float: float = 0.5> ()
        e1 = Add (e, one)
        g1 = Mul (hb, e1)
        act = Mul (g1, half)
        down = MatMul (act, w2)
        res2 = Add (res, down)
        pooled = ReduceMean <axes: ints = [1], keepdims: int = 0> (res2)
        y = MatMul (pooled, head) }""",
    "image": """<ir_version: 8, opset_import: ["" : 10]> g (float[b,2,6,6] x) => (float[b,4] y) <
        float[4,2,3,3] w,
        float[4] c, float[4] s, float[4] o, float[4] m, float[4] v, float[4,36] f, float[4] z> {
        a = Conv <kernel_shape: ints = [3, 3], pads: ints = [1, 1, 1, 1], strides: ints = [1, 1]> (x, w, c)
        n = BatchNormalization <epsilon: float = 0.001> (a, s, o, m, v)
        r = LeakyRelu <alpha: float = 0.2> (n)
        t = Clip <min: float = -1.0, max: float = 3.0> (r)
        q = AveragePool <kernel_shape: ints = [2, 2], strides: ints = [2, 2]> (t)
        l = Flatten <axis: int = 1> (q)
        h = Gemm <alpha: float = 1.0, beta: float = 1.0, transB: int = 1> (l, f, z)
        y = Tanh (h) }""",
    "words": """<ir_version: 8, opset_import: ["" : 13]> g (int64[b,5] ids) => (float[b,3] y) <
        float[9,4] table,
        float[5,4] places, float[4,3] w, int64[1] one, float e = {0.00001}, float two = {2.0}> {
        t = Gather <axis: int = 0> (table, ids)
        x = Add (t, places)
        mu = ReduceMean <axes: ints = [-1], keepdims: int = 1> (x)
        d = Sub (x, mu)
        sq = Pow (d, two)
        var = ReduceMean <axes: ints = [-1], keepdims: int = 1> (sq)
        ve = Add (var, e)
        sd = Sqrt (ve)
        n = Div (d, sd)
        g1 = Sigmoid (n)
        a = Mul (n, g1)
        p = ReduceSum <keepdims: int = 0> (a, one)
        l = MatMul (p, w)
        y = LogSoftmax <axis: int = 1> (l) }""",
}
VALUES = {"s": [0, 4, 2, 3], "r": [0, 4, 6], "one": [1]}


def small(name: str) -> ModelProto:
    """One of `SMALL`, with weights from a seed of its own."""
    model = parser.parse_model(SMALL[name])
    rng = np.random.default_rng(len(name))
    for info in model.graph.value_info:
        shape = tuple(d.dim_value for d in info.type.tensor_type.shape.dim)
        if info.type.tensor_type.elem_type == TensorProto.INT64:
            value = np.array(VALUES[info.name])
        else:
            value = rng.standard_normal(shape).astype(np.float32) * np.float32(0.5)
            value = np.abs(value) + np.float32(0.1) if info.name == "v" else value
        model.graph.initializer.append(numpy_helper.from_array(value, info.name))
    del model.graph.value_info[:]
    return model
