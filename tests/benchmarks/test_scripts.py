"""Every benchmark script answers `--help`: what it imports is there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = [p.stem for p in sorted(FOLDER.glob("*.py")) if "__main__" in p.read_text()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    script = importlib.import_module(name)
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == 0 and "usage" in capsys.readouterr().out.lower()
