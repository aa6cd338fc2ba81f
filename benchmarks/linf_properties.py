"""The twenty l-infinity properties of the competition's two Vision Transformers, 100 s each.

    python benchmarks/linf_properties.py [--method auto] [--timeout 100] [--threads 2]

Every property runs as `attn-bounds certify --vnnlib` would run it: in a child process with the time limit,
its best result kept. Needs the shared competition files. Finished rows are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from shared_vits import DATA, RESULTS, model_of, names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="auto")
    parser.add_argument("--timeout", type=float, default=100.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", default="pgd,ibp", help="by the first letters (default both)")
    args = parser.parse_args()
    import torch

    from attn_bounds import lirpa, read_vnnlib
    from attn_bounds.limits import LimitedVerifier
    from attn_bounds.report import progress

    torch.set_num_threads(args.threads)
    out = RESULTS / f"linf_properties-{lirpa.version()}.json"
    before = json.loads(out.read_text()) if out.is_file() else {"rows": []}
    rows: list[dict[str, Any]] = before["rows"]
    done = {(r["property"], r["asked"]) for r in rows}
    todo = [n for n in names(args.models) if (n, args.method) not in done]
    with progress(len(todo)) as begin:
        for name in todo:
            begin(name)
            with LimitedVerifier(model_of(name), timeout=args.timeout) as verifier:
                prop = read_vnnlib(
                    DATA / "vnnlib" / f"{name}.vnnlib.gz", verifier.input_shape, verifier.outputs
                )
                found = verifier.certify_property(prop, method=args.method)
            rows.append(
                {
                    "property": name,
                    "asked": args.method,
                    "status": found.status,
                    "method": found.method,
                    "margin": found.margin,
                    "won": sorted(set(found.won or [])),
                    "seconds": found.seconds,
                    "tried": found.tried,
                    "reason": found.reason,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            counts = {
                asked: {
                    s: sum(r["status"] == s for r in rows if r["asked"] == asked)
                    for s in ("verified", "falsified", "unknown")
                }
                for asked in dict.fromkeys(r["asked"] for r in rows)
            }
            command = " ".join(["python benchmarks/linf_properties.py", *sys.argv[1:]])
            result = {"command": command, "timeout": args.timeout, "threads": args.threads, "counts": counts}
            out.write_text(json.dumps({**result, "lirpa": lirpa.version(), "rows": rows}, indent=1))
    print(out.read_text().split('"rows"')[0] if out.is_file() else "nothing ran")


if __name__ == "__main__":
    main()
