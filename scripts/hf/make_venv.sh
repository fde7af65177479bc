#!/usr/bin/env bash
# make_venv.sh FOLDER: an environment with torch and transformers, for make_goldens.py. It has nothing of this package,
# so any Python from 3.10 serves ($PYTHON_HF, or python3).
set -euo pipefail
folder=$1
here=$(cd "$(dirname "$0")" && pwd)
stamp="$folder/.installed-hf"
wanted=$(cksum < "$here/requirements.txt")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
"${PYTHON_HF:-python3}" -m venv "$folder"
index=()
[ -z "${TORCH_INDEX:-}" ] || index=(--extra-index-url "$TORCH_INDEX")
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "${index[@]}" -r "$here/requirements.txt"
echo "$wanted" > "$stamp"
