#!/usr/bin/env bash
# Makes .venv with everything in it, or does nothing when nothing changed. `make setup` runs it.
#
#   ACCELERATOR=cpu|cuda   which build of the engine; by default cuda where nvidia-smi lists a GPU
#   PYTHON=...             the interpreter to build on; by default the first suitable one on the path
#   PIP_FIND_LINKS=FOLDER  a folder of wheels; used for the CPU build of torch if it holds one
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "error: $1" >&2
    exit 1
}

if [[ -z "${ACCELERATOR:-}" ]]; then
    # The list goes into a variable: grep -q on a pipe would end nvidia-smi early and count as a failure.
    gpus=$(nvidia-smi -L 2>/dev/null || true)
    if [[ "$gpus" == *"GPU 0"* ]]; then ACCELERATOR=cuda; else ACCELERATOR=cpu; fi
fi
case "$ACCELERATOR" in
cpu | cuda) ;;
*) fail "ACCELERATOR $ACCELERATOR: unknown; use cpu or cuda" ;;
esac

inputs=(pyproject.toml requirements/constraints.txt "requirements/overrides-$ACCELERATOR.txt" requirements/install.sh)
stamp=.venv/.installed
key=$(cat "${inputs[@]}" | cksum)
# What an environment cannot be changed into: the two engines share files, and scripts name the folder they are in.
kind="$ACCELERATOR $PWD"
if [[ -e .venv && "$(cat .venv/.kind 2>/dev/null || true)" != "$kind" ]]; then
    rm -rf .venv
fi
if [[ -x .venv/bin/python && "$(cat "$stamp" 2>/dev/null || true)" == "$key" ]]; then
    exit 0
fi

is_suitable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

if [[ ! -x .venv/bin/python ]] || ! is_suitable .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    found=""
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if is_suitable "$candidate"; then
            found=$candidate
            break
        fi
    done
    [[ -n "$found" ]] || fail "no Python 3.11, 3.12 or 3.13 found${PYTHON:+ at PYTHON=$PYTHON}; \
install one (Debian: apt-get install python3 python3-venv) or name it with PYTHON=/path/to/python3.11"
    "$found" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        fail "$found cannot make virtual environments; install its venv module (Debian: apt-get install python3-venv)"
    echo "making .venv with $("$found" --version)"
    rm -rf .venv
    "$found" -m venv .venv
    echo "$kind" >.venv/.kind
fi

rm -f "$stamp"
[[ -x .venv/bin/uv ]] || .venv/bin/python -m pip install --quiet --disable-pip-version-check uv

source_arguments=()
if [[ "$ACCELERATOR" == cpu ]]; then
    tag=$(.venv/bin/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    if compgen -G "${PIP_FIND_LINKS:-/nonexistent}/torch-*+cpu-$tag-*.whl" >/dev/null; then
        source_arguments=(--find-links "$PIP_FIND_LINKS")
    else
        source_arguments=(--torch-backend cpu)
    fi
fi

echo "installing for $ACCELERATOR"
# Compiled now, once: where bytecode is not written at run time, every engine process would spend 15 s more on imports.
.venv/bin/uv pip install --python .venv/bin/python --compile-bytecode \
    --constraints requirements/constraints.txt --overrides "requirements/overrides-$ACCELERATOR.txt" \
    ${source_arguments[@]+"${source_arguments[@]}"} \
    --editable ".[router,server,training,dev,$ACCELERATOR]"

if [[ "$ACCELERATOR" == cpu ]] && ! .venv/bin/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
    # The one system library that the engine needs and a bare system may lack.
    if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
        (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libnuma1) </dev/null
    else
        fail "the engine needs the system library libnuma.so.1; install it (Debian: apt-get install libnuma1)"
    fi
fi

echo "$key" >"$stamp"
