"""What a run leaves behind: checkpoints to resume from, and the trained model."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from models.checkpoints import build_once, write_checkpoint
from paged_jax_scripts.training.start import Start
from paged_jax_scripts.training.update import TrainState


class Checkpoints:
    """A folder of checkpoints, one a subfolder named by its step; made whole or not at all.

    Orbax writes into a temporary folder and renames it when all is written. A run that was killed
    while it saved leaves that folder behind; the next run removes it.

    Args:
      folder: made as needed.
      max_to_keep: the newest ones.
    """

    __slots__ = ("_folder", "_manager")

    def __init__(self, folder: Path, *, max_to_keep: int) -> None:
        self._folder = folder.absolute()
        # Not asynchronous: the next update takes over the buffers that are being written.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
        )
        with _quiet():
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def steps(self) -> list[int]:
        """Updates after which there is a checkpoint, in order."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, *, identity: Mapping[str, Any]) -> None:
        """Write a checkpoint, then remove the oldest beyond ``max_to_keep``.

        Args:
          state: of the run.
          identity: JSON-ready facts that a run must share to resume from it.
        """
        host = jax.device_get(state)
        record = {"identity": dict(identity), "crc32": _crcs(host)}
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_as_tree(host)), record=ocp.args.JsonSave(record)
        )
        with _quiet():
            self._manager.save(int(host.step), args=args, force=True)

    def restore(self, like: TrainState, *, identity: Mapping[str, Any]) -> TrainState | None:
        """Return the newest checkpoint's state, or None where there is no checkpoint.

        Args:
          like: a state of the same structure.
          identity: of the run; every difference is an error.

        Raises:
          ValueError: the checkpoint is of a run with other settings, or it is damaged.
        """
        if not self.steps:
            return None
        step = self.steps[-1]
        folder = self._folder / str(step)
        record = self._read(step, record=ocp.args.JsonRestore())["record"]
        self._require_same(folder, record["identity"], identity)
        tree = _as_tree(jax.tree.map(lambda _: 0, like))
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        restore = ocp.args.PyTreeRestore(item=tree, restore_args=as_numpy)
        leaves = jax.tree.leaves(self._read(step, state=restore)["state"])
        state = jax.tree.unflatten(jax.tree.structure(_as_tree(like)), leaves)
        state = TrainState(**state)
        for name, crc in _crcs(state).items():
            if crc != record["crc32"].get(name):
                raise ValueError(_damaged(folder, f"{name} has another CRC-32 than it was saved"))
        return jax.device_put(state)

    def _read(self, step: int, **args: Any) -> Any:
        try:
            with _quiet():
                return self._manager.restore(step, args=ocp.args.Composite(**args))
        except Exception as error:  # orbax and tensorstore raise many types for a damaged file
            raise ValueError(_damaged(self._folder / str(step), str(error))) from error

    def _require_same(
        self, folder: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]
    ) -> None:
        differences = [
            f"{name}={ours.get(name)!r} must be {saved.get(name)!r}"
            for name in sorted(saved.keys() | ours.keys())
            if saved.get(name) != ours.get(name)
        ]
        if differences:
            raise ValueError(
                f"{folder}: a run resumes with the settings it began with: "
                f"{', '.join(differences)}; or start another run in another folder"
            )


def export_model(folder: Path, start: Start, params: Any, *, source: Mapping[str, Any]) -> None:
    """Write a trained model as a folder that ``load_model`` reads, whole or not at all.

    Args:
      folder: the target; if it is there already, nothing is written.
      start: what the training started from.
      params: the trained weights.
      source: what the manifest says of their origin.
    """

    def build(target: Path) -> None:
        start.tokenizer.save(target)
        config = {
            "family": start.family.name,
            "config": start.config.to_json(),
            "eos_token_ids": list(start.eos_token_ids),
        }
        write_checkpoint(target, jax.device_get(params), config=config, source=dict(source))

    build_once(folder, build)


def _as_tree(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state}


def _crcs(state: TrainState) -> dict[str, int]:
    leaves = jax.tree_util.tree_leaves_with_path(_as_tree(state))
    return {
        jax.tree_util.keystr(path): zlib.crc32(np.ascontiguousarray(leaf)) for path, leaf in leaves
    }


def _damaged(folder: Path, why: str) -> str:
    return f"{folder}: damaged: {why}; delete the folder, and the run resumes from the one before"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what orbax logs at every save."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
