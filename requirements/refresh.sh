#!/usr/bin/env bash
# Writes requirements/constraints.txt anew: the newest versions that both kinds of machine (CPU, CUDA) can share.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

resolve() { # KIND [uv arguments...]: one sorted NAME==VERSION a line, without local version suffixes
    local kind=$1
    shift
    .venv/bin/uv pip compile pyproject.toml --extra router --extra server --extra training --extra dev --extra "$kind" \
        --overrides "requirements/overrides-$kind.txt" --python-version 3.11 --upgrade --no-annotate --no-header --quiet "$@" |
        sed 's/+[a-z0-9.]*$//' | LC_ALL=C sort
}

cpu_source=(--torch-backend cpu)
if compgen -G "${PIP_FIND_LINKS:-/nonexistent}/torch-*+cpu*.whl" >/dev/null; then
    cpu_source=(--find-links "$PIP_FIND_LINKS")
fi
resolve cpu "${cpu_source[@]}" >"$work/cpu"
resolve cuda >"$work/cuda"
{
    echo "# Exact versions of everything that an installation for the CPU and one for CUDA have in common."
    echo "# Made by: bash requirements/refresh.sh"
    LC_ALL=C comm -12 "$work/cpu" "$work/cuda"
} >"$work/constraints"
mv "$work/constraints" requirements/constraints.txt
wc -l requirements/constraints.txt
