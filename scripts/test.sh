#!/usr/bin/env bash
# A clone -> a virtual environment in .venv -> all tests. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

make_environment .venv dev
say "running the tests"
export OMP_NUM_THREADS=1 # one worker per core, each on its own
.venv/bin/python -m pytest --numprocesses auto --maxprocesses 4 --durations=10 "$@"
say "all tests passed"
