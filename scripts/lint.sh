#!/usr/bin/env bash
# ruff and mypy over the repository, as pre-commit and the tests have them; exits 1 if one finds something.
set -euo pipefail
WANT_TESTS=1
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
