"""Tables that say which tensors of a Hugging Face folder each weight of a model is made of.

One table a family serves all ways: shapes, random weights, reading, and writing the tensors back.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

Shapes = dict[str, Any]
Tree = dict[str, Any]


class TensorSource(Protocol):
    """Named tensors, read one at a time."""

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""
        ...

    @property
    def tensor_names(self) -> Sequence[str]:
        """Names of all tensors."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...], rows: slice = slice(None)) -> np.ndarray:
        """Return a tensor, or some rows of it.

        Args:
          name: the tensor's name.
          shape: the expected shape of the whole tensor.
          rows: of its first axis.

        Raises:
          ValueError: it is missing or has another shape.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """One leaf of the parameters.

    Attributes:
      path: of the leaf, for example ``layers.qkv.weight``.
      shape: of the leaf without the stacked axes.
      names: the tensors that it is made of, joined on its last axis; ``{layer}`` and ``{expert}``
        stand for indices.
      parts: sizes of the tensors on that axis; (): there is one tensor.
      is_transposed: the tensors are ``[out, in]``, as torch's linear layers have them.
      num_layers: leading axis of the leaf, or None.
      num_experts: the axis after that, or None.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    parts: tuple[int, ...] = ()
    is_transposed: bool = False
    num_layers: int | None = None
    num_experts: int | None = None

    @property
    def stacked_axes(self) -> tuple[int, ...]:
        """Sizes of the leading axes."""
        return tuple(n for n in (self.num_layers, self.num_experts) if n is not None)

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return (*self.stacked_axes, *self.shape)

    @property
    def is_table(self) -> bool:
        """Whether the leaf is one tensor as it is, so that rows of one are rows of the other."""
        return not self.stacked_axes and not self.is_transposed and len(self.names) == 1

    def indices(self) -> Iterator[tuple[int, ...]]:
        """All indices of the stacked axes, in C order; () where there are none."""
        return itertools.product(*map(range, self.stacked_axes))

    def tensors_at(
        self, index: tuple[int, ...]
    ) -> Iterator[tuple[str, tuple[int, ...], tuple[Any, ...]]]:
        """Name and shape of the tensors at one index, and where each goes in the leaf there."""
        sizes = (("layer", self.num_layers), ("expert", self.num_experts))
        keys = [key for key, size in sizes if size is not None]
        start = 0
        for name, size in zip(self.names, self.parts or (self.shape[-1],), strict=True):
            shape = (*self.shape[:-1], size)
            if self.is_transposed:
                shape = shape[::-1]
            where = (..., slice(start, start + size))
            yield name.format(**dict(zip(keys, index, strict=True))), shape, where
            start += size


def param_shapes(weights: Sequence[Weight]) -> Shapes:
    """Return the weights' shapes, as nested dicts like the weights themselves."""
    return nested([(weight.path, weight.leaf_shape) for weight in weights])


def tensor_names(weights: Sequence[Weight]) -> set[str]:
    """Return the names of all tensors that the weights are made of."""
    return {
        name
        for weight in weights
        for index in weight.indices()
        for name, _, _ in weight.tensors_at(index)
    }


def random_params(weights: Sequence[Weight], seed: int, *, dtype: Any = jnp.float32) -> Tree:
    """Return random weights for tests and benchmarks, made on the device.

    Args:
      weights: the table.
      seed: of the random stream.
      dtype: of the weights.

    Returns:
      Vectors near one (biases near zero), matrices normal with standard deviation
      ``fan_in ** -0.5``, tables 1, so that logits vary enough for greedy decoding to be stable.
    """
    weights = sorted(weights, key=lambda weight: weight.path.split("."))
    keys = jax.random.split(jax.random.key(seed), len(weights))

    def draw(key: jax.Array, weight: Weight) -> jax.Array:
        noise = jax.random.normal(key, weight.leaf_shape, jnp.float32)
        if len(weight.shape) == 1:
            return 0.1 * noise + (not weight.path.endswith("bias"))
        return noise * weight.shape[0] ** -0.5 if weight.num_layers else noise

    draw_all = jax.jit(
        lambda keys: [
            draw(key, weight).astype(dtype) for key, weight in zip(keys, weights, strict=True)
        ]
    )
    return nested([(one.path, leaf) for one, leaf in zip(weights, draw_all(keys), strict=True)])


def unstack_layers(params: Tree, *, num_layers: int) -> Tree:
    """Return the parameters with arrays for each layer, ``layers`` becoming a list of trees.

    Leaves are taken out of ``params`` one by one, so that memory holds no second copy of all. XLA
    then copies no layer's weights out of a stack: decoding is faster, above all of few rows, and
    compiles longer, as every layer is compiled by itself.

    Args:
      params: nested dicts; those under ``layers`` are emptied.
      num_layers: leading axis of the leaves under ``layers``.
    """
    split = jax.jit(lambda leaf: [leaf[layer] for layer in range(num_layers)])

    def take(tree: Tree) -> list[Tree]:
        layers: list[Tree] = [{} for _ in range(num_layers)]
        for name in list(tree):
            leaf = tree.pop(name)
            parts = take(leaf) if isinstance(leaf, dict) else split(leaf)
            for layer, part in zip(layers, parts, strict=True):
                layer[name] = part
        return layers

    return {**params, "layers": take(params["layers"])}


def nested(leaves: Sequence[tuple[str, Any]]) -> Tree:
    """Return leaves by dotted path as nested dicts."""
    tree: Tree = {}
    for path, leaf in leaves:
        *parents, last = path.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """Makes the weights of a stack of layers.

    Attributes:
      num_layers: L.
      prefix: of the tensors' names, for example ``model.layers.{layer}.``.
    """

    num_layers: int
    prefix: str

    def vector(self, path: str, name: str, size: int) -> Weight:
        """A norm's weight, or a bias, under its own name."""
        return Weight(
            path=f"layers.{path}",
            shape=(size,),
            names=(self.prefix + name,),
            num_layers=self.num_layers,
        )

    def linear(
        self,
        path: str,
        names: Sequence[str],
        *,
        width: int,
        parts: Sequence[int],
        is_transposed: bool = True,
    ) -> Weight:
        """The weight of a projection from ``width`` to ``sum(parts)`` channels.

        Args:
          path: of the projection.
          names: of the modules whose weights are joined.
          width: channels of the input.
          parts: channels of each module's output.
          is_transposed: stored ``[out, in]``.
        """
        return Weight(
            path=f"layers.{path}.weight",
            shape=(width, sum(parts)),
            names=tuple(f"{self.prefix}{name}.weight" for name in names),
            parts=tuple(parts),
            is_transposed=is_transposed,
            num_layers=self.num_layers,
        )

    def bias(self, path: str, names: Sequence[str], *, parts: Sequence[int]) -> Weight:
        """The bias of a projection.

        Args:
          path: of the projection.
          names: of the modules whose biases are joined.
          parts: channels of each module's output.
        """
        return Weight(
            path=f"layers.{path}.bias",
            shape=(sum(parts),),
            names=tuple(f"{self.prefix}{name}.bias" for name in names),
            parts=tuple(parts),
            num_layers=self.num_layers,
        )


def table(path: str, name: str, *, rows: int, width: int) -> Weight:
    """An embedding, or an output head, ``[rows, width]`` in both worlds."""
    return Weight(path=path, shape=(rows, width), names=(name,))


def vector(path: str, name: str, size: int) -> Weight:
    """A weight or bias outside of the layers."""
    return Weight(path=path, shape=(size,), names=(name,))
