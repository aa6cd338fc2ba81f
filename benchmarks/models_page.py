"""`docs/models.md` from the results of `models.py`. A library, not a script."""

from __future__ import annotations

from typing import Any

from dressings import DRESSINGS, WORDS
from zoo import ZOO

METHODS = ("ibp", "crown", "sensitivity")
HEAD = """# Models that were tried

Small configurations of real models (two layers, two heads, width 16, up to 16 tokens, random weights), each
exported by torch's two exporters at two opsets, and some processed further by onnxruntime. Written by
`{command}`; every number is in `benchmarks/results/models-{lirpa}.json`.
Versions: {versions}.

{files} files: {loaded} load and agree with onnxruntime (largest difference {difference:.1e} of the outputs'
size), {refused} are refused with a reason, {missing} could not be written.
{wrong}
"""


def page(result: dict[str, Any]) -> str:
    """The whole page."""
    rows = result["files"]
    loaded = [r for r in rows if r.get("loads")]
    versions = dict(result["versions"])
    text = HEAD.format(
        command=result["command"],
        lirpa=versions["auto_LiRPA"],
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        files=len(rows),
        loaded=len(loaded),
        difference=max((r["difference"] for r in loaded), default=0.0),
        refused=sum(r["written"] and not r["loads"] for r in rows),
        missing=sum(not r["written"] for r in rows),
        wrong="**Wrong results: " + "; ".join(result["wrong"]) + "**"
        if result["wrong"]
        else "Every bound lies below what the attack finds; a wrong result would be named here.",
    )
    return "\n".join([text, *_outcomes(rows), *_bounds(rows), *_reasons(rows)])


def _outcomes(rows: list[dict[str, Any]]) -> list[str]:
    """A line per model, a column per dressing."""
    lines = ["## Loading", "", "Cells: attention units found (m: with a mask), and seconds to load.", ""]
    lines += [f"* {dressing}: {words}" for dressing, words in WORDS.items()]
    lines += ["", "| model | " + " | ".join(DRESSINGS) + " |", "|---" * (1 + len(DRESSINGS)) + "|"]
    by = {(r["model"], r["dressing"]): r for r in rows}
    for name in ZOO:
        cells = [_cell(by.get((name, dressing))) for dressing in DRESSINGS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if not row["written"]:
        return "not written"
    if not row["loads"]:
        return "refused"
    mask = "m" if row["masked"] else ""
    return f"{row['attention']}{mask}, {row['load_seconds']:.1f} s"


def _bounds(rows: list[dict[str, Any]]) -> list[str]:
    """A line per model and ball: margins, and seconds, over all dressings that load."""
    lines = [
        "## Bounds",
        "",
        "Smallest margin at one random input: what the attack finds, and lower bounds. All dressings of a",
        "model compute one function: margins are those of the first, and the spread says how far the others",
        "are from it (over so many, where the others start at another value behind the embedding).",
        "The second ball is that of the first dressing alone. Seconds are means, on one core of a shared",
        "machine, building the graph included in the first.",
        "",
        "| model | ball | attack | " + " | ".join(METHODS) + " | spread | seconds |",
        "|---" * (5 + len(METHODS)) + "|",
    ]
    for name in ZOO:
        own = [r for r in rows if r["model"] == name and r.get("loads")]
        for i in range(len(own[0]["balls"]) if own else 0):
            balls = [r["balls"][i] for r in own if i < len(r["balls"])]
            first = balls[0]
            same = [b for b in balls if abs(b["attack"] - first["attack"]) < 1e-5]
            cells, spread = [], 0.0
            for method in METHODS:
                margins = [b[method].get("margin") for b in same]
                known = [m for m in margins if m is not None]
                said = first[method].get("margin")
                cells.append(f"{said:.3f}" if said is not None else "refused")
                spread = max(spread, max(known) - min(known)) if known else spread
            seconds = [sum(b[m]["seconds"] for b in balls) / len(balls) for m in METHODS]
            times = " / ".join(f"{s:.1f}" for s in seconds)
            ball = f"{first['norm']} {first['eps']:g}"
            of = "" if len(same) == len(balls) else f" ({len(same)} of {len(balls)})"
            cells = [name, ball, f"{first['attack']:.3f}", *cells, f"{spread:.0e}{of}", times]
            lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _reasons(rows: list[dict[str, Any]]) -> list[str]:
    """Why files are refused or were not written."""
    found: dict[str, list[str]] = {}
    for r in rows:
        if not r.get("loads"):
            found.setdefault(r["reason"], []).append(f"{r['model']} {r['dressing']}")
    if not found:
        return []
    lines = ["## Reasons", ""]
    for reason, where in found.items():
        nodes = reason.split("; ")
        short = reason if len(nodes) < 4 else f"{nodes[0]}; …; {nodes[-1]}"
        lines.append(f"* {', '.join(where)}: {short}")
    return [*lines, ""]
