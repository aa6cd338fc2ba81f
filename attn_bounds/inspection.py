"""What `inspect` and `export` print about a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.text import Text
from rich.tree import Tree

from .report import Printed, Row, new_table

if TYPE_CHECKING:
    from onnx_export import ModelInfo
    from onnx_export.structure import Part

Shapes = dict[str, list[int | str]]


def inspect_row(info: ModelInfo) -> Row:
    """The object that `inspect` prints."""
    from onnx_export.advice import nearest

    def parts(found: list[Part]) -> list[Row]:
        return [{**asdict(p), "units": [u.name for u in p.units]} for p in found]

    made = info.structure
    return {
        "model": info.path,
        "opset": info.opset,
        "inputs": info.inputs,
        "outputs": info.outputs,
        "parameters": made.parameters,
        "attention": [asdict(a) for a in info.attention],
        "structure": {
            "stem": parts(made.stem),
            "blocks": [parts(block) for block in made.blocks],
            "head": parts(made.head),
        },
        "chosen": info.chosen,
        "notes": info.notes,
        "unsupported": [{**asdict(u), "instead": nearest(u.op, u.why)} for u in info.unsupported],
        "head": info.head,
        "sha256": info.sha256,
    }


def inspect_parts(row: Row) -> list[Printed]:
    """Shapes, the recognised structure, attention units, notes, and what is not supported."""
    lines = Text(f"{row['model']}: opset {row['opset']}, {row['parameters']:,} parameters\n")
    lines.append(f"input   {_shapes(row['inputs'])}\noutput  {_shapes(row['outputs'])}")
    for note in row["chosen"]:
        lines.append(f"\n{note}")
    if row["head"]:
        lines.append(f"\nends in {row['head']}; bounds are those of the logits before it")
    parts: list[Printed] = [lines, structure_tree(row)]
    names = ("heads", "queries", "keys", "head_dim", "value_dim", "masked")
    if row["attention"]:
        table = new_table(f"attention: {len(row['attention'])} units", "name", *names, left=("name",))
        for a in row["attention"]:
            cells = [str(a[n]) for n in names[:-1]]
            table.add_row(a["name"], *cells, "yes" if a["masked"] else "no")
        parts.append(table)
    else:
        parts.append("no attention found")
    parts += [Text(f"note: {note}") for note in row["notes"]]
    if row["unsupported"]:
        words = ("op", "node", "why", "what would work")
        table = new_table(f"not supported: {len(row['unsupported'])} nodes", *words, left=words)
        for u in row["unsupported"]:
            table.add_row(u["op"], u["node"], u["why"], u["instead"] or "–")
        parts.append(table)
    else:
        parts.append("every node is supported")
    return parts


def structure_tree(row: Row) -> Tree:
    """Stem, blocks and head, a line per part; blocks that are alike are shown once."""
    units = {u["name"]: u for u in row["attention"]}
    made = row["structure"]
    tree = Tree(Text("structure"))
    for part in made["stem"]:
        _add_part(tree, part, units)
    alike: list[tuple[list[Row], list[str], int, int]] = []  # block, its lines, first and last number
    for number, block in enumerate(made["blocks"], 1):
        lines = [_part_line(part, units) for part in block]
        if alike and alike[-1][1] == lines and not any(p["unsupported"] for p in block):
            alike[-1] = (*alike[-1][:3], number)
        else:
            alike.append((block, lines, number, number))
    for block, _, first, last in alike:
        title = f"block {first}" if first == last else f"blocks {first} to {last}, each"
        size = sum(p["parameters"] for p in block)
        branch = tree.add(Text(f"{title}: {size:,} parameters"))
        for part in block:
            _add_part(branch, part, units)
    for part in made["head"]:
        _add_part(tree, part, units)
    return tree


def _add_part(tree: Tree, part: Row, units: dict[str, Row]) -> None:
    branch = tree.add(Text(_part_line(part, units)))
    for name in part["unsupported"]:
        branch.add(Text(f"not supported: {name}", "red"))


def _part_line(part: Row, units: dict[str, Row]) -> str:
    kinds = {"attention": "attention", "mlp": "MLP", "attention and mlp": "attention and MLP"}
    said = [f"({', '.join(map(str, part['input']))})"]
    if part["output"] != part["input"]:
        said[0] += f" → ({', '.join(map(str, part['output']))})"
    said += [_unit_words(units[name]) for name in part["units"]]
    said += [*part["linear"], *_counted(Counter(part["activations"])), *_counted(Counter(part["norms"]))]
    if part["residual"]:
        said.append("residual")
    kind = kinds.get(part["kind"]) or ", ".join(_counted(part["operators"]))
    return f"{kind}: {', '.join(said)}"


def _unit_words(unit: Row) -> str:
    heads = f"{unit['heads']} head{'' if unit['heads'] == 1 else 's'} of {unit['head_dim']}"
    if unit["kv_heads"] != unit["heads"]:
        heads += f" ({unit['kv_heads']} for keys and values)"
    tokens = f"{unit['queries']} queries, {unit['keys']} keys"
    if unit["queries"] == unit["keys"]:
        tokens = f"{unit['keys']} tokens"
    mask = "causal mask" if unit["causal"] else "mask" if unit["masked"] else ""
    kind = "by distances" if unit["kind"] == "distance" else ""
    return ", ".join(word for word in (heads, tokens, f"scale {unit['scale']:.3g}", mask, kind) if word)


def _counted(words: Mapping[str, int]) -> list[str]:
    return [f"{n} {word}" if n > 1 else word for word, n in words.items()]


def _shapes(values: Shapes) -> str:
    return ", ".join(f"{name} ({', '.join(map(str, dims))})" for name, dims in values.items())


def export_parts(row: Row) -> list[Printed]:
    """What was written, and whether the file can be certified."""
    lines = Text(f"{row['path']}: opset {row['opset']}, written by torch's exporter {row['exporter']}\n")
    lines.append(f"input   {_shapes(row['inputs'])}\noutput  {_shapes(row['outputs'])}\n")
    lines.append(f"onnxruntime agrees with the module: largest difference {row['difference']:.1e}")
    units = row["attention"]
    parts: list[Printed] = [lines]
    if units is not None:
        parts.append(f"attention found in the file: {units} unit{'' if units == 1 else 's'}")
    if row["notes"]:
        parts.append(Text("\n".join(f"note: {note}" for note in row["notes"])))
    return parts
