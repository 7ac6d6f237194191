#!/usr/bin/env bash
# A clone -> a virtual environment in .venv -> all tests. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

make_environment .venv dev
say "running the tests"
.venv/bin/python -m pytest --durations=10 "$@"
say "all tests passed"
