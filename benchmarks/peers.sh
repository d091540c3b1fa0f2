#!/bin/sh
# Makes the peers' own environment, benchmarks/.venv, from pinned versions. Does nothing where it is already there.
# PYTHON chooses the interpreter.
set -eu
cd "$(dirname "$0")"
if [ -x .venv/bin/python ] && .venv/bin/python -c 'import mujoco, ray, sb3_contrib, stable_baselines3, torch' \
    2>/dev/null; then
    exit 0
fi
"${PYTHON:-python3}" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
