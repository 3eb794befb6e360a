#!/bin/sh
# Usage: scripts/test.sh PYTHON cpu|gpu
#
# Runs every check, also after one failed, so that one run shows all that is wrong. Exit status 1 if any failed.
set -u

python=$1
where=$2
cd "$(dirname "$0")/.."
jobs=${JOBS:-2}
failed=
began=$(date +%s)

unset PYTHONPATH PYTHONHOME JUPYTER_PATH 2>/dev/null || true
export PYTHONNOUSERSITE=1 JUPYTER_PREFER_ENV_PATH=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=agg
export HF_HUB_OFFLINE=1

step() {
    name=$1
    shift
    printf '\n== %s\n' "$name"
    start=$(date +%s)
    "$@" </dev/null || failed="$failed, $name"
    printf '== %s: %s s\n' "$name" "$(($(date +%s) - start))"
}

notebooks() { # argument: how many at once
    threads=$(($(getconf _NPROCESSORS_ONLN) / $1)) # each notebook its share of the cores
    [ "$threads" -gt 0 ] || threads=1
    if ! ls notebooks/*.ipynb >/dev/null 2>&1; then
        echo "no notebooks yet"
        return 0
    fi
    # nbval counts a cell as a test. --timeout is pytest's guard over nbval's own limit for a cell.
    set -- -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=120 --timeout=300 -n "$1" --dist loadfile
    env OMP_NUM_THREADS="$threads" "$python" "$@" notebooks
}

if [ "$where" = gpu ]; then
    step "gpu tests" "$python" -m pytest -m gpu -n "$jobs" --dist loadfile tests
    step "notebooks on the GPU" notebooks 1
else
    step "ruff format" "$python" -m ruff format --check .
    step "ruff check" "$python" -m ruff check .
    step "mypy" "$python" -m mypy
    step "import-linter" "$python" -c 'from importlinter.cli import lint_imports_command as run; run()'
    step "tests" "$python" -m pytest -m "not gpu and not browser" -n "$jobs" --dist loadfile --durations=15 tests
    step "notebooks" notebooks "$jobs"
    step "browser tests" "$python" -m pytest -m browser tests
fi

printf '\n== all: %s s\n' "$(($(date +%s) - began))"
if [ -n "$failed" ]; then
    printf 'labkit: error: failed: %s\n' "${failed#, }" >&2
    exit 1
fi
