#!/usr/bin/env bash
# make_venv.sh FOLDER JAX: an environment that compiles for GPUs that are not there (1.3 GB, no cuDNN).
set -euo pipefail
folder=$1 jax=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
stamp="$folder/.installed-aot"
wanted=$( (cat "$root/pyproject.toml" "$root/constraints-aot.txt"; echo "$jax") | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
if [ ! -x "$folder/bin/pip" ]; then
  python=$("$root/scripts/find_python.sh")
  echo "Making a virtual environment in $folder with $("$python" --version)"
  "$python" -m venv "$folder"
fi
echo "Installing JAX $jax, its CUDA plugin and CUDA's compiler into $folder (1.3 GB the first time)"
install() { "$folder/bin/python" -m pip install --disable-pip-version-check --quiet "$@"; }
install -c "$root/constraints-aot.txt" "jax==$jax" "jax-cuda13-plugin==$jax" \
  "jax-cuda13-pjrt==$jax" nvidia-cuda-nvcc nvidia-cuda-nvdisasm absl-py jaxtyping
install --no-deps -e "$root"
echo "$wanted" > "$stamp"
