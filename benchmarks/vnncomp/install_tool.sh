#!/usr/bin/env bash
# install_tool.sh v1: once on a fresh machine. The environment goes to .venv in the repository's root.
# LIRPA=git takes auto_LiRPA from its repository instead of PyPI (see the Makefile).
set -euo pipefail
[ "${1:-v1}" = v1 ] || { echo "install_tool.sh: unknown version $1; this is v1" >&2; exit 1; }
cd "$(dirname "$0")/../.."
if ! command -v make >/dev/null || ! python3 -c 'import venv, ensurepip' 2>/dev/null; then
    sudo apt-get update && sudo apt-get install -y make python3-venv
fi
make venv LIRPA="${LIRPA:-pypi}"
.venv/bin/attn-bounds --version
