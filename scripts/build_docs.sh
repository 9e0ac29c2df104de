#!/usr/bin/env bash
# Builds the documentation as a site into build/docs, warnings are errors; arguments go to sphinx-build.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
if ! "$PYTHON" -c "import furo, myst_parser, sphinx" 2>/dev/null; then
    say "$PYTHON has no Sphinx, MyST or furo: $PYTHON -m pip install '.[docs]'"
    exit 1
fi
"$PYTHON" -m sphinx -W --keep-going --jobs auto "$@" docs build/docs
say "Written to build/docs/index.html"
