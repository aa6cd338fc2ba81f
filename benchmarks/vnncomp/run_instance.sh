#!/usr/bin/env bash
# run_instance.sh v1 CATEGORY ONNX VNNLIB RESULTS_FILE TIMEOUT: the verdict goes to the results file.
set -euo pipefail
if [ $# -ne 6 ] || [ "$1" != v1 ]; then
    echo "usage: run_instance.sh v1 CATEGORY ONNX VNNLIB RESULTS_FILE TIMEOUT" >&2
    exit 1
fi
. "$(dirname "$0")/environment.sh"
ONNX="$(network "$3")" || { echo unknown >"$5"; exit 0; }
# exec: a signal from the runner reaches the process that writes the results file
exec "$PYTHON" -m attn_bounds.cli verify "$ONNX" --vnnlib "$4" --results-file "$5" --timeout "$6"
