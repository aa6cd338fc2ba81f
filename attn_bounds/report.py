"""What the command line prints: JSON lines, tables, and a progress bar on stderr."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from .plain import json_line

if TYPE_CHECKING:
    from .jobs import Item
    from .results import Certificate, Explanation, Radius

Row = dict[str, Any]
Printed = Table | Tree | Text | str
STYLES = {"verified": "green", "falsified": "red", "unknown": "yellow"}
BASELINE = "stock-crown"
WIDE = 120  # columns when stdout is no terminal


class Output:
    """Where results go: as JSON lines at once, or into a table at the end.

    Arguments:
        file: stdout as it was when the command started; libraries that print meanwhile do not reach it.
    """

    def __init__(self, file: IO[str], as_json: bool) -> None:
        self.file, self.as_json = file, as_json
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.as_json:
            print(json_line(row), file=self.file, flush=True)

    def show(self, *parts: Printed) -> None:
        """Print tables and text, unless it is JSON that is wanted."""
        if self.as_json:
            return
        console = Console(file=self.file, highlight=False)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = WIDE
        for part in parts:
            console.print(part)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that vanishes at the end; yields a function that is told what begins.

    Nothing is drawn if stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total)
        started = False

        def begin(what: str) -> None:
            nonlocal started
            bar.update(task, description=what, advance=1 if started else 0)
            started = True

        yield begin


# ---------------------------------------------------------------------------------------------------------
# rows: their keys are what scripts rely on


def norm_value(norm: float) -> int | float:
    return norm if math.isinf(norm) else int(norm)


def norm_name(norm: float) -> str:
    return f"l{'inf' if math.isinf(norm) else int(norm)}"


def certificate_row(item: Item, c: Certificate, note: str = "") -> Row:
    """The line of `certify` and `compare` for one input."""
    d = c.as_dict()
    row: Row = {item.key: item.name}
    if item.label is not None:
        row["label"] = item.label
    for name in ("status", "margin", "eps", "norm", "method", "seconds", "reason"):
        row[name] = d.pop(name)
    row["norm"] = norm_value(c.norm)
    if note:
        row["note"] = note
    if d.get("counterexample") is None:
        d.pop("counterexample", None)
    return {**row, **d}


def radius_row(item: Item, r: Radius, note: str = "") -> Row:
    """The line of `radius` for one input."""
    row: Row = {item.key: item.name}
    if item.label is not None:
        row["label"] = item.label
    row.update(
        radius=r.radius,
        attack_radius=r.attack_radius,
        norm=norm_value(r.norm),
        method=r.method,
        seconds=r.seconds,
        evaluations=r.evaluations,
        reason=r.reason,
    )
    if note:
        row["note"] = note
    return row


ACROSS = 5  # inputs beside one another in the table of `explain`


def explain_row(item: Item, e: Explanation, against: int | None, eps: float | None, norm: float) -> Row:
    """One line of `explain`."""
    return {
        item.key: item.name,
        "against": against,
        "margin": e.margin,
        "centre": e.centre,
        "eps": eps,
        "norm": norm_value(norm),
        "shares": [{"set": label, "symbols": size, "loss": loss} for label, size, loss in e.shares],
    }


def explain_table(title: str, rows: Sequence[Row]) -> list[Printed]:
    """A line per error set, a column per input; several tables where there are many inputs."""
    tables = [_explain_part(title, rows[i : i + ACROSS]) for i in range(0, len(rows), ACROSS)]
    return [*tables, "Between centre and margin: what each error set takes, first layer to last."]


def _explain_part(title: str, rows: Sequence[Row]) -> Table:
    labels = list(dict.fromkeys(s["set"] for r in rows for s in r["shares"]))
    names = [str(r.get("index", r.get("property"))) for r in rows]
    table = new_table(title, "input", *names, left=("input",))
    table.add_row("against", *(str(r["against"] if r["against"] is not None else "–") for r in rows))
    table.add_row("centre", *(_number(r["centre"]) for r in rows), end_section=True)
    losses = [{s["set"]: s["loss"] for s in r["shares"]} for r in rows]
    for label in labels:
        table.add_row(label, *(_number(loss.get(label)) for loss in losses))
    table.add_section()
    table.add_row("margin ≥", *(_number(r["margin"]) for r in rows))
    return table


def explain_plot(path: str, title: str, rows: Sequence[Row]) -> None:
    """Stacked bars of `explain`, one per input; needs the extra `plot`.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    from .errors import InputError

    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'attn-bounds[plot]'") from None
    labels = list(dict.fromkeys(s["set"] for r in rows for s in r["shares"]))
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.4 * len(rows)), layout="constrained")
    for i, r in enumerate(rows):
        left = 0.0
        for j, label in enumerate(labels):
            loss = next((s["loss"] for s in r["shares"] if s["set"] == label), 0.0)
            axes.barh(i, loss, left=left, color=f"C{j}", label=label if i == 0 else None)
            left += loss
        axes.plot(
            [r["centre"]] * 2, [i - 0.4, i + 0.4], color="black", label=None if i else "margin at the centre"
        )
    names = [str(r.get("index", r.get("property"))) for r in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set(
        title=title, xlabel="taken from the margin (logits); verified where the bar ends before the line"
    )
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: the plot cannot be written ({e})") from None
    finally:
        plt.close(figure)


# ---------------------------------------------------------------------------------------------------------
# tables


def new_table(title: str, *columns: str, left: Sequence[str] = ()) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for name in columns:
        words = name == "reason" or name in left
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    return table


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}g}"


def certify_table(title: str, rows: Sequence[Row]) -> list[Printed]:
    """A line per input, and a count of the outcomes."""
    cells: dict[str, list[Any]] = {
        "status": [Text(r["status"], STYLES.get(r["status"], "red")) for r in rows],
        "margin ≥": [_number(r["margin"]) for r in rows],
        "by": [r["method"] for r in rows],
    }
    known = dict.fromkeys([*STYLES, *(r["status"] for r in rows)])  # an error is rare
    counts = {s: sum(r["status"] == s for r in rows) for s in known}
    words = ", ".join(f"{n} {s}" for s, n in counts.items())
    return [_item_table(title, rows, cells), f"{words}; {sum(r['seconds'] for r in rows):.1f} s"]


def radius_table(title: str, rows: Sequence[Row]) -> list[Printed]:
    """A line per input, and the mean radius."""
    cells: dict[str, list[Any]] = {
        "radius ≥": [_number(r["radius"]) for r in rows],
        "attack at": [_number(r["attack_radius"]) for r in rows],
        "bounds": [str(r["evaluations"]) for r in rows],
    }
    mean = _mean([r["radius"] for r in rows])
    words = f"mean certified radius {_number(mean)}; {sum(r['seconds'] for r in rows):.1f} s"
    return [_item_table(title, rows, cells), words]


def _item_table(title: str, rows: Sequence[Row], cells: dict[str, list[Any]]) -> Table:
    """One line per input: its name and label, `cells`, seconds, and the reason where some row has one."""
    columns: dict[str, list[Any]] = {"input": [str(r.get("index", r.get("property"))) for r in rows]}
    if any("label" in r for r in rows):
        columns["label"] = [str(r.get("label", "")) for r in rows]
    columns |= cells
    columns["seconds"] = [f"{r['seconds']:.2f}" for r in rows]
    if any(r["reason"] for r in rows):
        columns["reason"] = [r["reason"] for r in rows]
    table = new_table(title, *columns, left=("input", "status", "by"))
    for values in zip(*columns.values(), strict=True):
        table.add_row(*values)
    return table


def compare_table(title: str, rows: Sequence[Row], methods: Sequence[str], words: str) -> list[Printed]:
    """A line per eps and method: counts, mean margin bound and seconds, also relative to `stock-crown`.

    Arguments:
        words: which auto_LiRPA the stock methods are, for the line below the table.
    """
    table = new_table(
        title, "eps", "method", "certified", "falsified", "mean margin ≥", "difference", "s/input", "ratio",
        left=("method",),
    )  # fmt: skip
    for eps in dict.fromkeys(r["eps"] for r in rows):
        base = [r for r in rows if r["eps"] == eps and r["method"] == BASELINE]
        for number, method in enumerate(methods):
            own = [r for r in rows if r["eps"] == eps and r["method"] == method]
            pairs = [
                (a, b) for a, b in zip(own, base, strict=False) if None not in (a["margin"], b["margin"])
            ]
            margins = [r["margin"] for r in own if r["margin"] is not None]
            seconds = _mean([r["seconds"] for r in own])
            stock = _mean([r["seconds"] for r in base])
            table.add_row(
                _number(eps) if number == 0 else "",
                method,
                f"{sum(r['status'] == 'verified' for r in own)}/{len(own)}",
                str(sum(r["status"] == "falsified" for r in own)),
                _number(_mean(margins)),
                "–" if not pairs else f"{_mean([a['margin'] - b['margin'] for a, b in pairs]):+.4g}",
                f"{seconds:.3g}",
                "–" if not base else f"{seconds / stock:.2f}" if stock > 0 else "–",
                end_section=number == len(methods) - 1,
            )
    lines = [f"{words}."] if words else []
    if BASELINE in methods:
        lines.append(f"Difference and ratio are to {BASELINE}.")
    missing = sum(r["margin"] is None for r in rows)
    if missing:
        lines.append(
            f"{missing} of {len(rows)} bounds are missing in the means (see --json for the reasons)."
        )
    return [table, " ".join(lines)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
