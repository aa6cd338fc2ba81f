# What the scripts beside this file share: sourced, not run. Sets ROOT, PYTHON and ONNX.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PYTHON="${ATTN_BOUNDS_PYTHON:-$ROOT/.venv/bin/python}"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

# network PATH_OR_PAIRS: the model's path; newer runners give a list of (name, path) pairs.
network() {
    case "$1" in
    \[*) "$PYTHON" -c '
import ast, sys
pairs = ast.literal_eval(sys.argv[1])
if len(pairs) != 1:
    sys.exit(f"{len(pairs)} networks; only properties of one network are supported")
print(pairs[0][1])' "$1" ;;
    *) printf '%s\n' "$1" ;;
    esac
}
