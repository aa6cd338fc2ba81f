"""Many inputs at once: the same rows as one after the other, and none lost when something dies."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from attn_bounds import InputError, parallel, read_vnnlib, report
from attn_bounds.jobs import Item, Jobs
from attn_bounds.limits import LimitedVerifier
from attn_bounds.parallel import Recipe, Saved, Work, certify_all

from .cli_tools import Files, rows, run

WIDTHS = (0.01, 0.02, 0.05, 5.0)


class Deadly(Recipe):
    """Kills the process that builds it."""

    def build(self) -> Jobs | LimitedVerifier:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("parallel"))


def works(files: Files, deadly: int | None = None) -> list[Work]:
    found = []
    for i, width in enumerate(WIDTHS):
        prop = read_vnnlib(files.vnnlib(width), (4,), 3)
        kind = Deadly if i == deadly else Recipe
        recipe = kind(str(files.model), options={"logits": False})
        found.append(Work.of(recipe, Item(prop.name, prop=prop), {"method": "crown"}, "", 1))
    return found


def essence(row: parallel.Row) -> tuple[object, ...]:
    return row["property"], row["status"], row["margin"]


@pytest.mark.slow
def test_processes_give_the_rows_of_one(files: Files, tmp_path: Path) -> None:
    alone = dict(certify_all(works(files)))
    save = tmp_path / "rows.jsonl"
    together = dict(certify_all(works(files), jobs=2, save=save))
    assert [essence(together[i]) for i in range(4)] == [essence(alone[i]) for i in range(4)]
    assert [alone[i]["status"] for i in range(4)] == ["verified"] * 3 + ["falsified"]
    assert sorted(json.loads(line)["property"] for line in save.read_text().splitlines()) == sorted(
        f"width_{w}" for w in WIDTHS
    )


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_own_input_only(files: Files) -> None:
    found = dict(certify_all(works(files, deadly=1), jobs=2))
    assert [found[i]["status"] for i in range(4)] == ["verified", "unknown", "verified", "falsified"]
    assert "the worker process died" in found[1]["reason"]


def test_what_is_saved_is_not_computed_again(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = tmp_path / "rows.jsonl"
    first = dict(certify_all(works(files)[:2], save=save))
    with open(save, "ab") as file:
        file.write(b'{"key": "cut off by a kill')
    computed: list[object] = []
    real = parallel.certify

    def certify(work: Work) -> parallel.Row:
        computed.append(work.item.name)
        return real(work)

    monkeypatch.setattr(parallel, "certify", certify)
    again = dict(certify_all(works(files), save=save))
    assert computed == ["width_0.05", "width_5.0"]
    assert [essence(again[i]) for i in (0, 1)] == [essence(first[i]) for i in (0, 1)]
    assert len(Saved(save).rows) == 4
    # other options are other work
    other = [Work.of(w.recipe, w.item, {"method": "ibp"}, "", 1) for w in works(files)]
    assert not {w.key for w in other} & {w.key for w in works(files)}


def test_bad_files_of_rows(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    for text, words in (
        ("no json\n{}\n", ":1: is no line"),
        ("[1]\n", "something else"),
        ("{}\n", "something else"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            Saved(path)
    with pytest.raises(InputError, match="cannot be written"):
        Saved(tmp_path / "missing" / "rows")


def test_the_command(files: Files, tmp_path: Path) -> None:
    save = tmp_path / "rows.jsonl"
    options = (
        "certify",
        files.model,
        "--data",
        files.data,
        "--eps",
        0.01,
        "--method",
        "crown",
        "--save",
        save,
    )
    found = rows(*options)
    assert [r["index"] for r in found] == [0, 1, 2, 3] and all(r["status"] == "verified" for r in found)
    table = run(*options, code=0).stdout
    assert "4 verified, 0 falsified" in table and len(save.read_text().splitlines()) == 4
    bad = run(*options, "--batch", 2, code=2)
    assert "--batch does not go with --jobs" in bad.stderr


@pytest.mark.slow
def test_on_a_cluster(files: Files) -> None:
    """dask's local one; the same command with another address uses many machines."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        found = dict(certify_all(works(files), jobs=2, cluster=cluster.scheduler_address))
    assert [found[i]["status"] for i in range(4)] == ["verified"] * 3 + ["falsified"]


def test_an_input_with_an_error_is_a_row(files: Files) -> None:
    item, job = works(files)[0].item, {"norm": 3.0, "eps": 1.0}
    ((_, row),) = certify_all([Work.of(Recipe(str(files.model)), item, job, "", 1)])
    assert row["status"] == "error" and "norm 3" in row["reason"]
    _, counts = report.certify_table("title", [row])
    assert isinstance(counts, str) and "1 error" in counts


def test_no_cluster_there(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("Timed out")

    monkeypatch.setattr(distributed, "Client", refuse)
    with pytest.raises(InputError, match="no dask scheduler answers at tcp://nowhere:1"):
        list(certify_all(works(files), cluster="tcp://nowhere:1"))
