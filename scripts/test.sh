#!/usr/bin/env bash
# Test: bash scripts/test.sh [pytest arguments], for example -m slow, or tests/cli -k sweep.
# Makes the environment when it is missing. Without arguments the default tier (docs/tests.md), and with
# -m wide the next one, on all cores, four at most. With -m slow two processes for each core
# (tests/conftest.py), eight at most, because these tests wait for half of their time.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root" || exit 2
case " $* " in
    "  " | *" -m wide "*) set -- -n auto --maxprocesses 4 "$@" ;;
    *" -m slow "*) set -- -n auto --maxprocesses 8 --dist worksteal "$@" ;;
esac
exec "$python" -m pytest "$@"
