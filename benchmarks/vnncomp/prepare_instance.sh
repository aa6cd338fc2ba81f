#!/usr/bin/env bash
# prepare_instance.sh v1 CATEGORY ONNX VNNLIB: no analysis; nonzero skips the instance.
# Checks that the files are there and reads the libraries once, so that they are in the disk cache.
set -euo pipefail
if [ $# -ne 4 ] || [ "$1" != v1 ]; then
    echo "usage: prepare_instance.sh v1 CATEGORY ONNX VNNLIB" >&2
    exit 1
fi
. "$(dirname "$0")/environment.sh"
ONNX="$(network "$3")"
for file in "$ONNX" "$4"; do
    [ -r "$file" ] || { echo "prepare_instance.sh: cannot read $file" >&2; exit 1; }
done
"$PYTHON" -c 'import attn_bounds.verifier, attn_bounds.vnnlib, attn_bounds.module, onnx_export'
