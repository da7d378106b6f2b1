#!/usr/bin/env bash
# For whoever has a GPU: bash scripts/gpu_check.sh checks it in less than 10 minutes, the cheapest first, and prints one table.
# It makes the environment of the README when it is missing; with --here it takes the python3 on PATH as it is (no network is
# needed), names what is missing there, and runs what can be run. The figures go to gpu_check.json (--json FILE), nothing else
# is left behind. --only WORDS, --seconds N, --anyway (without a GPU: what needs none); --help.
# Exit code: 0 all is well, 1 something is wrong, 2 there is no environment, 3 there is no GPU that torch can use.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 2
if [ "${1:-}" = --here ]; then
    shift
    python=$(command -v python3) || { echo "There is no python3 on PATH." >&2; exit 2; }
else
    source "$root/scripts/environment.sh"
fi
export PYTHONPATH="$root:$root/scripts${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
exec "$python" -m gpu_check "$@"
