#!/usr/bin/env bash
# wheels.sh DIR [REQUIREMENT...]
# Unpacks into DIR/site what kvpipe needs and a machine with only Python 3.12, torch and the usual tools lacks.
# Nothing is resolved: further requirements are taken as they are named. pip's own configuration says where from.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: wheels.sh DIR [REQUIREMENT...]" >&2; exit 2; }
mkdir -p "$1"
SITE=$(cd "$1" && pwd)/site
shift
PY=${PY:-python3}

NEEDS=(typing-extensions==4.16.0 msgspec==0.22.0 pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0
  typing-inspection==0.4.5 pydantic-settings==2.16.3 python-dotenv==1.2.4 structlog==26.1.0)

# pip matches each platform tag exactly, so every one that a wheel may carry is named
TARGET=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
for n in 39 35 34 31 28 27 24 17; do TARGET+=(--platform "manylinux_2_${n}_x86_64"); done
TARGET+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any)

rm -rf "$SITE"
"$PY" -m pip install --quiet --no-cache-dir --no-compile --disable-pip-version-check \
  "${TARGET[@]}" --target "$SITE" "${NEEDS[@]}" "$@"
rm -rf "$SITE/bin"
find "$SITE" -name __pycache__ -prune -exec rm -rf {} +
du -sh "$SITE"
