#!/usr/bin/env bash
# Test: bash scripts/test.sh [pytest arguments], for example -m slow, or tests/cli -k sweep.
# Makes the environment when it is missing. Without arguments: everything not marked slow or gpu, on
# all cores, four at most.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root" || exit 2
[ $# -gt 0 ] || set -- -n auto --maxprocesses 4
exec "$python" -m pytest "$@"
