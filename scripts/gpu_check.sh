#!/usr/bin/env bash
# For whoever has a GPU: bash scripts/gpu_check.sh runs every GPU test and the GPU benchmark, in less than 9 minutes, and
# prints one table. Exit code: 0 all is well, 1 a test failed or a comparison is wrong or could not be made, 2 there is no
# environment, 3 there is no GPU that torch can use (nothing was run).
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root" || exit 2

"$python" - <<'PYTHON' || exit 3
import sys

import torch

if not torch.cuda.is_available():
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA (a CPU build)"
    sys.exit(f"No GPU: torch {torch.__version__} is built for {built} and sees no device. Nothing was checked.")
for number in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(number)
    print(f"GPU {number}: {found.name}, {found.total_memory / 2**30:.0f} GiB", file=sys.stderr)
PYTHON

log=$(mktemp -d) || exit 2
trap 'rm -rf "$log"' EXIT
timeout -k 10 240 "$python" -m pytest -m gpu --maxfail 20 --junitxml "$log/tests.xml" >"$log/tests.txt" 2>&1
tests=$?
[ $tests -eq 0 ] || tail -n 60 "$log/tests.txt" >&2
timeout -k 10 280 "$python" scripts/benchmark.py gpu --repeats 2 --json "$log/gpu.json" >"$log/gpu.txt"
benchmark=$?
"$python" scripts/gpu_table.py "$log" $tests $benchmark
