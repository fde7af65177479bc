#!/usr/bin/env bash
# make_venv.sh FOLDER EXTRAS CONSTRAINTS: make or refresh a virtual environment with this package in it.
set -euo pipefail
folder=$1 extras=$2 constraints=$3
root=$(cd "$(dirname "$0")/.." && pwd)
stamp="$folder/.installed-$extras"
wanted=$(cat "$root/pyproject.toml" "$root/$constraints" | cksum)
is_current() {  # an environment with the development tools serves the demo too
  local file
  for file in "$stamp" "$folder/.installed-dev"; do
    [ -f "$file" ] && [ "$(cat "$file")" = "$wanted" ] && [ -x "$folder/bin/python" ] && return 0
  done
  return 1
}
if is_current; then exit 0; fi
python=$("$root/scripts/find_python.sh")
# One install at a time, when two make runs start at once.
mkdir -p "$folder"
if command -v flock >/dev/null; then exec 9>"$folder/.lock"; flock 9; fi
if is_current; then exit 0; fi
if [ ! -x "$folder/bin/pip" ]; then
  echo "Making a virtual environment in $folder with $("$python" --version)"
  "$python" -m venv "$folder"
fi
echo "Installing paged-jax and what it needs into $folder (a minute or two the first time)"
target="$root"
[ "$extras" = base ] || target="$root[$extras]"
progress=(--progress-bar on)
[ -t 1 ] || progress=(--quiet)
"$folder/bin/python" -m pip install --disable-pip-version-check "${progress[@]}" -c "$root/$constraints" -e "$target"
# pyright cannot follow setuptools' import hook from paged_jax_scripts to scripts/.
for packages in "$folder"/lib/python3.*/site-packages; do
  ln -sfn "$root/scripts" "$packages/paged_jax_scripts"
done
echo "$wanted" > "$stamp"
