#!/usr/bin/env bash
# Makes .venv with vLLM (CPU build, or CUDA build where there is an NVIDIA driver), kvpipe and the tools. Does nothing the second time.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=cpu; lock=requirements/cpu.lock
if [ "${VLLM_BUILD:-auto}" != cpu ] && command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  kind=cuda; lock=requirements/cuda.in
fi
debian() { # Debian packages that a bare machine may lack, when we may install them
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
  else
    echo "please install: $*" >&2; return 1
  fi
}
pip() { "${venv:-.venv}/bin/python" -m pip --disable-pip-version-check "$@" 2> >(grep -v "is ignored: it is neither" >&2); }
# the timeline page is tested in a real browser, tiers with a real server (Valkey, Mooncake and S3 come as Python packages),
# calls of the CUDA driver with a library that is compiled from its header, and the files in deploy/ with their own programs;
# of Prometheus only promtool is used
if [ "${1:-}" = programs ]; then
  { command -v chromium && command -v chromedriver && command -v redis-server && command -v gcc && command -v stunnel &&
    command -v systemd-analyze && PATH=$PATH:/usr/sbin command -v nginx && ldconfig -p | grep libibverbs.so.1; } >/dev/null 2>&1 ||
    debian chromium chromium-driver redis-server libibverbs1 gcc libc6-dev stunnel4 systemd nginx-light
  command -v promtool >/dev/null 2>&1 || debian --no-install-recommends prometheus
  cmp -s requirements/deploy.lock .cache/deploy/lock && exit
  rm -rf .cache/deploy
  pip install -q --no-deps --target .cache/deploy -r requirements/deploy.lock
  cp requirements/deploy.lock .cache/deploy/lock
  exit
fi
# the site's generator; what it shares with vLLM's packages (Jinja2, Pygments, …) is there, or comes along
if [ "${1:-}" = docs ]; then
  [ -x .venv/bin/python ] || tools/setup.sh
  cmp -s requirements/docs.lock .venv/.kvpipe-docs && exit
  echo "Adding Sphinx to .venv, once."
  pip install -q -r requirements/docs.lock
  cp requirements/docs.lock .venv/.kvpipe-docs
  exit
fi
# cosmic-ray, in an environment of its own that also finds what is in .venv
if [ "${1:-}" = mutation ]; then
  made=.cache/mutation
  cmp -s requirements/mutation.lock "$made/.kvpipe-mutation" && exit
  echo "Installing cosmic-ray in $made, once."
  .venv/bin/python -m venv --clear "$made"
  site='import sysconfig; print(sysconfig.get_path("purelib"))'
  .venv/bin/python -c "$site" > "$("$made/bin/python" -c "$site")/kvpipe.pth"
  venv=$made pip install -q --no-deps -r requirements/mutation.lock
  cp requirements/mutation.lock "$made/.kvpipe-mutation"
  exit
fi
stamp=.venv/.kvpipe-$kind; want=$(cat "$lock" pyproject.toml tools/setup.sh | sha256sum)
[ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ] && exit 0

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvpipe needs Python 3.11 or newer; set PYTHON=…" >&2; exit 1; }
"$python" -c 'import venv, ensurepip' 2>/dev/null || debian python3-venv
ldconfig -p 2>/dev/null | grep -q libnuma.so.1 || [ "$kind" = cuda ] || debian libnuma1 || true

echo "Setting up .venv for vLLM's $kind build; this takes a few minutes, once."
[ -x .venv/bin/python ] || "$python" -m venv .venv
if [ "$kind" = cpu ]; then
  pip install -q --no-deps --no-compile -r "$lock" || {
    echo "If torch==…+cpu was not found: point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at PyTorch's CPU wheels." >&2; exit 1; }
  pip install -q --no-deps --no-build-isolation -e .
else
  pip install -q -r "$lock" hatchling editables -e '.[dev]'
fi
printf '%s\n' "$want" > "$stamp"
