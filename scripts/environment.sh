# Sourced by train.sh and test.sh: defines $root and $python, an interpreter with everything installed.
#
# The environment lies in .venv in the repository (HYBRIDTRAIN_VENV names another place). It is
# complete when its file "complete" holds the checksum of the files that describe it; otherwise
# make_environment.py makes or repairs it. The usual case costs one cksum.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${HYBRIDTRAIN_VENV:-$root/.venv}
python=$venv/bin/python

_wanted() {
    { cat "$root/pyproject.toml" "$root/constraints.txt"; echo "$root ${HYBRIDTRAIN_TORCH:-auto}"; } | cksum
}

_base_python() {
    local name
    for name in "${HYBRIDTRAIN_PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        [ -n "$name" ] && command -v "$name" >/dev/null 2>&1 || continue
        "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || continue
        echo "$name"
        return
    done
    echo "hybridtrain needs Python 3.11, 3.12 or 3.13, and none is on PATH; install one or name it in HYBRIDTRAIN_PYTHON." >&2
    return 2
}

_complete() {
    [ -x "$python" ] && [ -r "$venv/complete" ] && [ "$(cat "$venv/complete")" = "$1" ]
}

_ensure_environment() {
    local wanted base
    wanted=$(_wanted) || return
    _complete "$wanted" && return
    base=$(_base_python) || return
    "$base" "$root/scripts/make_environment.py" "$root" "$venv" "$wanted"
}

_ensure_environment || exit
