"""Converts models between Hugging Face folders, GGUF files (reading) and this library's folders.

    python -m paged_jax_scripts.convert --source=model.gguf --target=folder --to=hf

Weights are read, converted and written a few at a time. The target appears when it is whole, and
nothing is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from models.conversion import DTYPES, FORMATS, convert
from paged_jax_scripts import cli

SOURCE = flags.DEFINE_string(
    "source", None, "a GGUF file, a Hugging Face folder, or a folder of this library", required=True
)
TARGET = flags.DEFINE_string("target", None, "the folder to make", required=True)
TO = flags.DEFINE_enum(
    "to", "orbax", FORMATS, "orbax: this library's folders; hf: config.json and safetensors"
)
DTYPE = flags.DEFINE_enum(
    "weights_dtype", "auto", DTYPES, "of the weights; auto: the source's, float32 for GGUF files"
)
MAX_SHARD_MB = flags.DEFINE_integer(
    "max_shard_mb", 5_000, "most megabytes of a safetensors file", lower_bound=1
)


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}: use --source and --target")
    convert(
        SOURCE.value,
        TARGET.value,
        to=TO.value,
        dtype=DTYPE.value,
        max_shard_bytes=MAX_SHARD_MB.value * 10**6,
        progress=True,
    )


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
