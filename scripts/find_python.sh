#!/usr/bin/env bash
# Print a Python >= 3.12 that can make virtual environments; say what to install where there is none.
set -u
candidates=("${PYTHON:-}" python3.13 python3.12 python3.14 python3 python
  "$HOME"/.pyenv/versions/3.1[2-4]*/bin/python /opt/homebrew/bin/python3.1[2-4] /usr/local/bin/python3.1[2-4])
for candidate in "${candidates[@]}"; do
  [ -n "$candidate" ] || continue
  path=$(command -v "$candidate" 2>/dev/null) || continue
  if "$path" -c 'import ensurepip, sys, venv; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
    echo "$path"
    exit 0
  fi
done
cat >&2 <<'MESSAGE'
No Python 3.12, 3.13 or 3.14 (with the venv module) was found; JAX needs 3.12 or later. Install one:
  Debian 13, Ubuntu 24.04:  sudo apt-get install python3 python3-venv
  any Linux or macOS:       curl -LsSf https://astral.sh/uv/install.sh | sh && uv python install 3.12
  pyenv:                    pyenv install 3.12
  conda:                    conda create -n py312 python=3.12
then run make again, or name it: make demo PYTHON=/path/to/python3.12
MESSAGE
exit 1
