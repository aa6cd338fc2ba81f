"""Damaged and altered ONNX files: each is refused with a clear error, or loaded as what onnxruntime computes.

    python benchmarks/fuzz_onnx.py                  # 2,000 files, into benchmarks/results/fuzz_onnx.json
    python benchmarks/fuzz_onnx.py --count 100 --seed 1 --no-save
    python benchmarks/fuzz_onnx.py --only 1234 --keep bad.onnx    # one of them again, its file kept

Every file is a bundled or small generated model after one to three changes: of attributes, constants, shapes,
inputs, operators and opsets, or of bits and length. Workers are processes: a crash, a hang or a traceback is
an outcome like others, and makes the run fail, as does a module that differs from onnxruntime.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from fuzz_models import SMALL, small
from onnx import ModelProto, TensorProto, helper, numpy_helper

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-4  # from onnxruntime, relative to the outputs; loading itself asks for 1e-5 on its own inputs
MEMORY = 6 << 30  # address space of a worker
SECONDS = 60.0  # for one file
GOOD = ("loaded", "refused", "refused: onnxruntime")

OPERATORS = (
    "Add", "Mul", "Sub", "Div", "Max", "Min", "MatMul", "Relu", "Tanh", "Exp", "Sqrt", "Softmax", "Neg",
    "Transpose", "Identity", "Reshape", "Erf", "Gelu", "Abs", "Log", "ReduceMean", "ReduceMax", "Pow",
    "Concat", "Gather", "Einsum", "LayerNormalization", "Flatten", "Squeeze", "Expand",
)  # fmt: skip


def sources() -> dict[str, bytes]:
    """The undamaged files."""
    files = {name: small(name).SerializeToString() for name in SMALL}
    return {"digits": (ROOT / "examples" / "digits_vit.onnx").read_bytes(), **files}


# ---------------------------------------------------------------------------------------------------------
# changes


def _number(rng: random.Random, value: int) -> int:
    return rng.choice([value + 1, value - 1, -value, 0, 1, 2, -1, 2 * value, 7, 2**31, -(2**63), 2**40])


def attribute(model: ModelProto, rng: random.Random) -> None:
    """An attribute gets another value, or goes."""
    nodes = [n for n in model.graph.node if n.attribute]
    if not nodes:
        return
    node = rng.choice(nodes)
    i = rng.randrange(len(node.attribute))
    a = node.attribute[i]
    if rng.random() < 0.15:
        del node.attribute[i]
    elif a.type == onnx.AttributeProto.INT:
        a.i = max(-(2**63), min(2**63 - 1, _number(rng, a.i)))
    elif a.type == onnx.AttributeProto.FLOAT:
        a.f = rng.choice([-a.f, 2 * a.f, 0.0, 1e-30, 1e30, float("nan"), float("inf"), a.f + 0.1])
    elif a.type == onnx.AttributeProto.INTS:
        kind = rng.randrange(4)
        if kind == 0:
            del a.ints[rng.randrange(len(a.ints) or 1) :]
        elif kind == 1:
            a.ints.append(rng.randrange(4))
        elif a.ints:
            j = rng.randrange(len(a.ints))
            a.ints[j] = max(-(2**63), min(2**63 - 1, _number(rng, a.ints[j])))
    elif a.type == onnx.AttributeProto.STRING:
        a.s = rng.choice([b"", b"none", b"tanh", b"SAME_UPPER", b"\xff\xfe"])


def constant(model: ModelProto, rng: random.Random) -> None:
    """A few entries of a constant change, or its shape does."""
    tensor = rng.choice(list(model.graph.initializer))
    array = np.array(numpy_helper.to_array(tensor))
    flat = array.reshape(-1)
    kind = rng.randrange(3)
    if kind == 0 and len(flat):
        j = rng.randrange(len(flat))
        if array.dtype.kind == "f":
            flat[j] = rng.choice([0.0, -flat[j], 1e10, np.nan, np.inf, 1e-40])
        else:
            flat[j] = max(-(2**63), min(2**63 - 1, _number(rng, int(flat[j]))))
    elif kind == 1:
        array = np.delete(flat, rng.randrange(len(flat))) if len(flat) > 1 else array[None]
    else:
        array = array.T if array.ndim > 1 else array[None]
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))


def shape(model: ModelProto, rng: random.Random) -> None:
    """A dimension of the input changes: its size, or whether it is fixed."""
    dims = model.graph.input[0].type.tensor_type.shape.dim
    d = rng.choice(list(dims))
    if rng.random() < 0.3:
        d.dim_param = "n"
    else:
        d.dim_value = rng.choice([0, 1, 2, 3, 4, 5, -1, 1000, 2**40])


def wiring(model: ModelProto, rng: random.Random) -> None:
    """A node reads another value, its inputs are swapped, or one is left out."""
    node = rng.choice([n for n in model.graph.node if n.input])
    kind = rng.randrange(4)
    names = [o for n in model.graph.node for o in n.output] + [i.name for i in model.graph.input]
    j = rng.randrange(len(node.input))
    if kind == 0:
        node.input[j] = rng.choice(names)
    elif kind == 1:
        given = list(node.input)
        rng.shuffle(given)
        node.input[:] = given
    elif kind == 2:
        node.input[j] = ""
    else:
        del node.input[j]


def operator(model: ModelProto, rng: random.Random) -> None:
    """A node becomes another operator, or goes, or the opset changes."""
    kind = rng.randrange(5)
    if kind == 0:
        model.opset_import[0].version = rng.choice([1, 6, 7, 9, 11, 12, 13, 17, 18, 20, 23, 99])
    elif kind == 1:
        del model.graph.node[rng.randrange(len(model.graph.node))]
    else:
        node = rng.choice(list(model.graph.node))
        node.op_type = rng.choice(OPERATORS)
        if rng.random() < 0.5:
            del node.attribute[:]


def output(model: ModelProto, rng: random.Random) -> None:
    """Another value is returned, or two are, or the declared type is wrong."""
    kind = rng.randrange(3)
    name = rng.choice([o for n in model.graph.node for o in n.output])
    if kind == 0:
        del model.graph.output[:]
    if kind < 2:
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    else:
        model.graph.output[0].type.tensor_type.elem_type = rng.choice([0, 6, 7, 10, 11, 99])


CHANGES: list[Callable[[ModelProto, random.Random], None]] = [
    attribute, attribute, attribute, constant, constant, shape, wiring, operator, output,
]  # fmt: skip


def damaged(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The file after one kind of damage, and what that was."""
    kind = rng.random()
    if kind < 0.15:
        return data[: rng.randrange(len(data))], "truncated"
    if kind < 0.4:
        flipped = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8, 64])):
            # half of them where the graph is, the rest anywhere
            at = rng.randrange(min(len(data), 3000) if rng.random() < 0.5 else len(data))
            flipped[at] ^= 1 << rng.randrange(8)
        return bytes(flipped), "bits flipped"
    model = onnx.load_from_string(data)
    made = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change = rng.choice(CHANGES)
        try:
            change(model, rng)
            made.append(change.__name__)
        except (ValueError, OverflowError, IndexError, TypeError):
            continue  # protobuf does not take that value
    return model.SerializeToString(), "+".join(made) or "nothing"


def case(seed: int, files: dict[str, bytes]) -> tuple[bytes, str]:
    """File number `seed`, and what it is."""
    rng = random.Random(seed)
    name = rng.choice(sorted(files))
    data, what = damaged(files[name], rng)
    return data, f"{name}: {what}"


# ---------------------------------------------------------------------------------------------------------
# one file


def outcome(path: Path) -> tuple[str, str]:
    """What becomes of a file: one of `GOOD`, or what went wrong; and the words."""
    import torch

    from attn_bounds.errors import InputError
    from onnx_export import Oracle, load

    torch.manual_seed(0)
    try:
        module = load(path)
    except InputError as e:
        if str(path) not in str(e):
            return "an error that does not name the file", str(e)
        return ("refused: onnxruntime" if "onnxruntime cannot run" in str(e) else "refused"), str(e)
    except Exception as e:
        return "a traceback", f"{type(e).__name__}: {e}"
    oracle = Oracle(path)
    for batch, scale in ((1, 0.3), (1, 3.0), (3, 1.0)):
        x = scale * torch.randn(batch, *module.input_shape)
        with torch.no_grad():
            mine, theirs = module(x), oracle(x)
        mine = mine.reshape(theirs.shape) if mine.numel() == theirs.numel() else mine
        if mine.shape != theirs.shape:
            return "another shape than onnxruntime", f"{tuple(mine.shape)} {tuple(theirs.shape)}"
        both = torch.isfinite(mine) & torch.isfinite(theirs)
        if not torch.equal(torch.isfinite(mine), torch.isfinite(theirs)) and batch == 1 and scale < 1:
            return "another value than onnxruntime", "only one of them is finite"
        gap = (
            (mine - theirs)[both].abs().max() / theirs[both].abs().max().clamp(min=1.0) if both.any() else 0.0
        )
        if float(gap) > TOLERANCE:
            return "another value than onnxruntime", f"by {float(gap):.2g} at batch {batch}"
    return "loaded", ""


def _work(connection: Connection, folder: str) -> None:
    """Body of a worker: files in, outcomes out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # onnxruntime and protobuf complain there
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import torch

    torch.set_num_threads(1)
    files = sources()
    path = Path(folder) / f"{os.getpid()}.onnx"
    while True:
        try:
            seed = connection.recv()
        except EOFError:
            return
        path.write_bytes(case(seed, files)[0])
        connection.send(outcome(path))


class Worker:
    """A process that is started again after it died or hung."""

    def __init__(self, folder: str) -> None:
        self.folder, self.process, self.seed = folder, None, -1
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, end = context.Pipe()
        self.process: Any = context.Process(target=_work, args=(end, self.folder), daemon=True)
        self.process.start()
        end.close()

    def give(self, seed: int) -> None:
        self.seed, self.begin = seed, time.perf_counter()
        self.connection.send(seed)

    def result(self) -> tuple[str, str] | None:
        """The outcome of the file given last; None while there is none."""
        try:
            if self.connection.poll(0.01):
                return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            self._start()
            return "a crash", f"exit code {code}"
        if time.perf_counter() - self.begin < SECONDS:
            return None
        self.process.kill()
        self.process.join()
        self._start()
        return "a hang", f"nothing after {SECONDS:g} s"

    def stop(self) -> None:
        self.connection.close()
        self.process.join(5)
        self.process.kill()


def run(
    seeds: list[int], workers: int, say: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """The outcomes of files, in their order."""
    files, rows, todo = sources(), {}, list(reversed(seeds))
    with tempfile.TemporaryDirectory() as folder:
        pool = [Worker(folder) for _ in range(min(workers, len(seeds)))]
        busy: list[Worker] = []
        for worker in pool:
            worker.give(todo.pop())
            busy.append(worker)
        while busy:
            for worker in list(busy):
                if (found := worker.result()) is None:
                    continue
                kind, words = found
                words = words.replace(folder, "").strip()
                rows[worker.seed] = {
                    "file": worker.seed,
                    "change": case(worker.seed, files)[1],
                    "outcome": kind,
                    "words": words[:300],
                    "seconds": round(time.perf_counter() - worker.begin, 3),
                }
                if kind not in GOOD:
                    say(json.dumps(rows[worker.seed]))
                if len(rows) % 100 == 0:
                    say(f"{len(rows)} of {len(seeds)}")
                if todo:
                    worker.give(todo.pop())
                else:
                    busy.remove(worker)
        for worker in pool:
            worker.stop()
    return [rows[seed] for seed in seeds]


def main() -> None:
    """Entry point of the script."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--count", type=int, default=2000, help="files (default: 2000)")
    options.add_argument("--seed", type=int, default=0, help="number of the first one")
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--only", type=int, help="this file alone")
    options.add_argument("--keep", type=Path, help="with --only: write the file there")
    options.add_argument("--no-save", action="store_true", help="print, record nothing")
    given = options.parse_args()
    if given.only is not None and given.keep:
        given.keep.write_bytes(case(given.only, sources())[0])
    seeds = [given.only] if given.only is not None else list(range(given.seed, given.seed + given.count))
    begin = time.perf_counter()
    rows = run(seeds, given.workers, print)
    counts = Counter(r["outcome"] for r in rows)
    slowest = max(r["seconds"] for r in rows)
    print(dict(counts), f"slowest {slowest:.1f} s, all {time.perf_counter() - begin:.0f} s")
    if given.only is not None:
        print(json.dumps(rows[0], indent=1))
    elif not given.no_save:
        import onnxruntime

        record = {
            "seeds": [seeds[0], seeds[-1]],
            "onnxruntime": onnxruntime.__version__,
            "onnx": onnx.__version__,
            "outcomes": dict(counts),
            "slowest_seconds": slowest,
            "loaded_by_change": dict(Counter(r["change"] for r in rows if r["outcome"] == "loaded")),
            "not_good": [r for r in rows if r["outcome"] not in GOOD],
        }
        (ROOT / "benchmarks" / "results" / "fuzz_onnx.json").write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(0 if set(counts) <= set(GOOD) else 1)


if __name__ == "__main__":
    main()
