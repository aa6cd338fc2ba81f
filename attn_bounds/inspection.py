"""What `inspect` and `export` print about a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from .report import Row, new_table

if TYPE_CHECKING:
    from onnx_export import ModelInfo

Shapes = dict[str, list[int | str]]


def inspect_row(info: ModelInfo) -> Row:
    """The object that `inspect` prints."""
    units = [
        {
            "name": a.name,
            "heads": a.heads,
            "queries": a.queries,
            "keys": a.keys,
            "head_dim": a.head_dim,
            "value_dim": a.value_dim,
            "masked": a.masked,
        }
        for a in info.attention
    ]
    return {
        "model": info.path,
        "opset": info.opset,
        "inputs": info.inputs,
        "outputs": info.outputs,
        "attention": units,
        "chosen": info.chosen,
        "unsupported": [{"op": u.op, "node": u.node, "why": u.why} for u in info.unsupported],
        "head": info.head,
        "sha256": info.sha256,
    }


def inspect_parts(row: Row) -> list[Table | Text | str]:
    """Shapes, attention units, and what is not supported."""
    lines = Text(f"{row['model']}: opset {row['opset']}\n")
    lines.append(f"input   {_shapes(row['inputs'])}\noutput  {_shapes(row['outputs'])}")
    for note in row["chosen"]:
        lines.append(f"\n{note}")
    if row["head"]:
        lines.append(f"\nends in {row['head']}; bounds are those of the logits before it")
    parts: list[Table | Text | str] = [lines]
    names = ("heads", "queries", "keys", "head_dim", "value_dim", "masked")
    if row["attention"]:
        table = new_table(f"attention: {len(row['attention'])} units", "name", *names, left=("name",))
        for a in row["attention"]:
            cells = [str(a[n]) for n in names[:-1]]
            table.add_row(a["name"], *cells, "yes" if a["masked"] else "no")
        parts.append(table)
    else:
        parts.append("no attention found")
    if row["unsupported"]:
        table = new_table(
            f"not supported: {len(row['unsupported'])} nodes", "op", "node", "why", left=("op", "node", "why")
        )
        for u in row["unsupported"]:
            table.add_row(u["op"], u["node"], u["why"])
        parts.append(table)
    else:
        parts.append("every node is supported")
    return parts


def _shapes(values: Shapes) -> str:
    return ", ".join(f"{name} ({', '.join(map(str, dims))})" for name, dims in values.items())


def export_parts(row: Row) -> list[Table | Text | str]:
    """What was written, and whether the file can be certified."""
    lines = Text(f"{row['path']}: opset {row['opset']}, written by torch's exporter {row['exporter']}\n")
    lines.append(f"input   {_shapes(row['inputs'])}\noutput  {_shapes(row['outputs'])}\n")
    lines.append(f"onnxruntime agrees with the module: largest difference {row['difference']:.1e}")
    units = row["attention"]
    parts: list[Table | Text | str] = [lines]
    parts.append(f"attention found in the file: {units} unit{'' if units == 1 else 's'}")
    if row["notes"]:
        parts.append(Text("\n".join(["not loaded by attn-bounds:", *(f"  {note}" for note in row["notes"])])))
    return parts
