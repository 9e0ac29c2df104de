#!/usr/bin/env bash
# Tests the oldest and the newest torch and transformers that the README names, and a transformers between whose
# quantizers have other methods, each pair in an environment of its own that is made for it:
#   scripts/test_versions.sh [oldest|between|newest] [pytest arguments, tests to run included]
# Without any for pytest those tests run that need torch or transformers most.
set -euo pipefail
WANT_TESTS=1
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export JITGEMM_TEST_LIBRARIES=1
cd "$ROOT"

declare -A versions=(
    [oldest]="torch==2.8.0 transformers==4.57.6 torchao==0.15.0" # newer torchao needs a newer torch, and no pip says so
    [between]="torch==2.13.0 transformers==5.17.0"
    [newest]="torch==2.15.0 transformers==5.24.0"
)
declare -A pythons=([oldest]=python3.11 [between]=python3.11 [newest]=python3.13) # where they are there
ends=(oldest between newest)
if [ -n "${versions[${1:-none}]:-}" ]; then
    ends=("$1")
    shift
fi
if [ $# -eq 0 ]; then
    set -- tests/{nn,graph} tests/gemm/test_{op,op_launch,arguments}.py tests/weight/test_weight.py \
        tests/checkpoint/test_{deepseek,parts}.py tests/moe/test_moe.py \
        tests/repository/test_docs.py
fi
status=0
for end in "${ends[@]}"; do
    read -r torch others <<<"${versions[$end]}"
    VENV="$ROOT/.venv-$end"
    rm -rf "$VENV"
    if "${pythons[$end]}" -c "" 2>/dev/null; then
        "${pythons[$end]}" -m venv "$VENV"
    fi
    JITGEMM_TORCH="$torch" fill_venv $others
    say "$end: $("$VENV/bin/python" --version), $torch $others"
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$VENV/bin/python" -m pytest -n 4 --dist loadfile "$@" || status=$?
done
exit "$status"
