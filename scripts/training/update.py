"""One update of the weights, and the loss of rows that are held out: pure functions, jitted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from paged_jax.model import ApplyFn
from paged_jax.uncached import UncachedAttention
from paged_jax_scripts.training.settings import TrainSettings


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run carries from update to update.

    Attributes:
      step: updates made.
      params: float32 weights.
      opt_state: of optax.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["loss", "grad_norm"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class UpdateStats:
    """Of one update: mean loss in nats a token, and the gradient's norm before clipping."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]


def learning_rates(settings: TrainSettings) -> optax.Schedule:
    """A straight rise to ``learning_rate``, then a cosine to ``final_share`` of it."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if settings.num_warmup_steps else settings.learning_rate,
        peak_value=settings.learning_rate,
        warmup_steps=settings.num_warmup_steps,
        decay_steps=settings.num_steps,
        end_value=settings.learning_rate * settings.final_share,
    )


def decayed(params: Any) -> Any:
    """Which weights decay: matrices and tables; not norms and biases, stacked over layers or not.

    >>> decayed({"layers": {"norm": jnp.ones((2, 8)), "out": jnp.ones((2, 8, 8))}})
    {'layers': {'norm': False, 'out': True}}
    """

    def is_matrix(path: Any, leaf: Array) -> bool:
        is_stacked = any(getattr(key, "key", None) == "layers" for key in path)
        return leaf.ndim - is_stacked >= 2

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW (arXiv:1711.05101)."""
    return optax.chain(
        optax.clip_by_global_norm(settings.max_grad_norm),
        optax.adamw(
            learning_rates(settings),
            b1=settings.beta1,
            b2=settings.beta2,
            weight_decay=settings.weight_decay,
            mask=decayed,
        ),
    )


def new_state(params: Any, settings: TrainSettings) -> TrainState:
    """Return the state before the first update; it has a copy of the weights."""
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(settings).init(params))


def token_losses(
    apply: ApplyFn, params: Any, rows: Int[Array, "B T+1"], *, recompute_scores: bool
) -> Float[Array, "B T"]:
    """Return the cross-entropy of every token but the first, in nats."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32), inputs.shape)
    cache = UncachedAttention(recompute_scores=recompute_scores)
    logits, _ = apply(params, inputs, positions, cache, logits_at=positions)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


def make_update(
    apply: ApplyFn, settings: TrainSettings
) -> Callable[[TrainState, Int[Array, "B T+1"]], tuple[TrainState, UpdateStats]]:
    """Return the jitted update; it takes its state over (donated)."""
    optimizer = make_optimizer(settings)

    def mean_loss(params: Any, rows: Array) -> Array:
        losses = token_losses(apply, params, rows, recompute_scores=settings.recompute_scores)
        return jnp.mean(losses)

    def accumulate(params: Any, rows: Array) -> tuple[Array, Any]:
        """Loss and gradients of a batch, a microbatch at a time."""
        count = settings.num_microbatches
        if count == 1:
            return jax.value_and_grad(mean_loss)(params, rows)

        def add(sums: Any, part: Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(mean_loss)(params, part)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        sums, _ = jax.lax.scan(add, zeros, rows.reshape(count, -1, rows.shape[1]))
        return jax.tree.map(lambda leaf: leaf / count, sums)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: TrainState, rows: Array) -> tuple[TrainState, UpdateStats]:
        loss, gradients = accumulate(state.params, rows)
        changes, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)
        stats = UpdateStats(loss, optax.tree.norm(gradients))
        return TrainState(state.step + 1, params, opt_state), stats

    return update


def make_evaluation(
    apply: ApplyFn, settings: TrainSettings
) -> Callable[[Any, Int[Array, "B T+1"]], Float[Array, ""]]:
    """Return the jitted sum of the losses of some rows."""

    @jax.jit
    def summed_loss(params: Any, rows: Array) -> Array:
        losses = token_losses(apply, params, rows, recompute_scores=settings.recompute_scores)
        return jnp.sum(losses)

    return summed_loss
