#!/bin/sh
# Puts the peers (requirements.txt) into benchmarks/.venv, away from the project's own environment. PYTHON chooses the
# interpreter; peers and project are best measured on the same one. A second call only checks the versions.
set -eu
cd "$(dirname "$0")"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=../.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
# On Linux the usual torch brings several GB of GPU libraries; TORCH_INDEX names a package index with the CPU build.
if [ -n "${TORCH_INDEX:-}" ]; then
    .venv/bin/python -m pip install --quiet --index-url "$TORCH_INDEX" "$(grep '^torch==' requirements.txt)"
fi
.venv/bin/python -m pip install --quiet -r requirements.txt
.venv/bin/python -c "
import gymnasium, ray, stable_baselines3, torch
print('peers ready: torch', torch.__version__, '| stable-baselines3', stable_baselines3.__version__,
      '| ray', ray.__version__, '| gymnasium', gymnasium.__version__)"
