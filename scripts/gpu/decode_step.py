"""The whole decode step: projections, write, attention and MLP over layers, and the engine."""

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.devices import current_device
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention, plan_attention
from pallas_kernels.paged_attention.arg_specs import HEAD_SHAPES, HeadShape

from .big_pool import free_bytes
from .numerics import memory_of
from .worker import Context, Item, Prepared, Programs, lower, use


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """A model's geometry and a load; weights and pool are bfloat16.

    Attributes:
        heads: H, K and D.
        layers: L.
        hidden: channels of the residual stream.
        mlp: channels of the gated MLP.
        batch: rows, one new token each.
        context: tokens of every row, the new one included.
        block_size: S.
    """

    heads: HeadShape
    layers: int
    hidden: int
    mlp: int
    batch: int
    context: int
    block_size: int = 16

    @property
    def num_blocks(self) -> int:
        """Blocks a layer, the null block included."""
        return 1 + self.batch * -(-self.context // self.block_size)

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Stacked over layers."""
        heads, C, F = self.heads, self.hidden, self.mlp
        qkv = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        shapes = {
            "qkv": (C, qkv),
            "out": (heads.num_heads * heads.head_dim, C),
            "up": (C, 2 * F),
            "down": (F, C),
        }
        return {name: (self.layers, *shape) for name, shape in shapes.items()}

    @property
    def pool_shape(self) -> tuple[int, ...]:
        """[L*P, 2, K, S, D]."""
        heads = self.heads
        rows = self.layers * self.num_blocks
        return (rows, 2, heads.num_kv_heads, self.block_size, heads.head_dim)

    @property
    def weight_bytes(self) -> int:
        """Of all layers; every step reads them."""
        return 2 * sum(int(np.prod(shape)) for shape in self.weight_shapes.values())

    @property
    def kv_bytes(self) -> int:
        """Keys and values that a step reads."""
        per_token = 4 * self.heads.num_kv_heads * self.heads.head_dim
        return self.layers * self.batch * self.context * per_token


def step_items(context: Context) -> list[Item]:
    """Llama-3-8B's geometry at a few loads with each backend and without attention; the engine."""
    if context.rehearsal:
        heads = HeadShape(name="rehearsal", num_heads=2, num_kv_heads=1, head_dim=64)
        shape = StepShape(heads=heads, layers=2, hidden=64, mlp=64, batch=1, context=20)
        shapes = [shape]
    else:
        llama = StepShape(
            heads=HEAD_SHAPES["llama3-8b"],
            layers=32, hidden=4096, mlp=14336, batch=32, context=2048,
        )  # fmt: skip
        loads = ((32, 2048), (128, 1024), (1, 8192))
        shapes = [dataclasses.replace(llama, batch=b, context=c) for b, c in loads]
    # In a rehearsal the interpreter's time is what counts, and one backend shows that it runs.
    names = ("none", *context.backends[: 1 if context.rehearsal else None])
    items = [
        Item(
            item_id=f"step/{s.heads.name} B{s.batch} context {s.context}/{name}",
            section="step",
            contender="" if name == "none" else name,
            prepare=functools.partial(_prepare, context, s, name),
        )
        for s in shapes
        for name in names
    ]
    engine = Item(
        item_id="engine/smollm2",
        section="step",
        prepare=functools.partial(_prepare_engine, context),
    )
    return [*items[: len(names)], engine, *items[len(names) :]]


def decode_step(
    pool: jax.Array,
    x: jax.Array,
    weights: dict[str, jax.Array],
    tables: jax.Array,
    lens: jax.Array,
    shape: StepShape,
    backend: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Layers scanned, the pool in the carry: `(pool, x [B, C])`; backend "none" leaves attention
    and write out, which shows what the rest of the step takes.
    """
    heads, B = shape.heads, shape.batch
    H, K, D = heads.num_heads, heads.num_kv_heads, heads.head_dim
    ones, last = jnp.ones(B, jnp.int32), lens - 1
    blocks = jnp.take_along_axis(tables, (last // shape.block_size)[:, None], axis=1)  # [B, 1]
    slots = blocks * shape.block_size + (last % shape.block_size)[:, None]
    options: dict[str, Any] = {"backend": backend, "interpret": interpret}
    if backend != "none":
        work = plan_attention(
            pool, lens, ones, num_heads=H, num_new=1, table_width=tables.shape[1], **options
        )
        options["work"] = work

    def layer(carry: Any, xs: Any) -> Any:
        pool, x = carry
        index, w = xs
        qkv = (_normed(x) @ w["qkv"]).reshape(B, 1, H + 2 * K, D)
        q, k, v = jnp.split(qkv, [H, H + K], axis=2)
        if backend == "none":
            out = q
        else:
            first = index * shape.num_blocks
            at = slots + first * shape.block_size
            pool = kv_write(pool, k, v, at, ones, interpret=interpret)
            out = paged_attention(q, pool, tables + first, lens, ones, **options)
            assert isinstance(out, jax.Array)  # no lse was asked for
        x = x + out.reshape(B, H * D) @ w["out"]
        gate, up = jnp.split(_normed(x) @ w["up"], 2, axis=-1)
        return (pool, x + (jax.nn.silu(gate) * up) @ w["down"]), None

    xs = (jnp.arange(shape.layers, dtype=jnp.int32), weights)
    (pool, x), _ = jax.lax.scan(layer, (pool, x), xs)
    return pool, x


def _normed(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _prepare(context: Context, shape: StepShape, backend: str) -> Prepared:
    struct = jax.ShapeDtypeStruct
    weights = {n: struct(s, jnp.bfloat16) for n, s in shape.weight_shapes.items()}
    pool = struct(shape.pool_shape, jnp.bfloat16)
    x = struct((shape.batch, shape.hidden), jnp.bfloat16)
    tables = struct((shape.batch, (shape.num_blocks - 1) // shape.batch), jnp.int32)
    lens = struct((shape.batch,), jnp.int32)
    step = functools.partial(decode_step, shape=shape, backend=backend, interpret=context.rehearsal)
    lowered = lower(jax.jit(step, donate_argnums=0), pool, x, weights, tables, lens)
    pool_bytes = 2 * int(np.prod(shape.pool_shape))

    def run(programs: Programs) -> dict[str, Any]:
        need = shape.weight_bytes + pool_bytes
        if need > 0.9 * free_bytes():
            return {"status": "skipped", "reason": f"{need} bytes do not fit"}
        program = use(programs, "step")
        arrays = _step_arrays(shape)
        pool, x, weights, tables, lens = arrays
        seconds, out = [], x
        for _ in range(2 if context.rehearsal else 6):
            steps = 1 if context.rehearsal else 10
            start = time.perf_counter()
            for _ in range(steps):  # dispatched ahead, one wait at the end
                pool, out = program(pool, x, weights, tables, lens)
            jax.block_until_ready(out)
            seconds.append((time.perf_counter() - start) / steps)
        moved = shape.weight_bytes + (0 if backend == "none" else shape.kv_bytes)
        median = statistics.median(seconds[1:])
        finite = bool(jnp.isfinite(out).all())
        return {
            "status": "measured" if finite else "fail",
            "reason": "" if finite else "the step's output is not finite",
            "note": f"{median * 1e3:.2f} ms a step",
            "seconds_per_step": median,
            "least_bytes": moved,
            "floor_seconds": moved / current_device().memory_bandwidth,
            "pool_bytes": pool_bytes,
            **memory_of(program),
        }

    return Prepared(programs={"step": lowered}, run=run)


def _step_arrays(shape: StepShape) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), len(shape.weight_shapes) + 1)

    @functools.partial(jax.jit, static_argnames="size")
    def draw(key: jax.Array, size: tuple[int, ...]) -> jax.Array:
        one = jax.random.normal(key, size[1:], jnp.bfloat16) * size[-2] ** -0.5
        return jnp.broadcast_to(one, size)  # alike in every layer: memory does not mind

    weights = {
        name: draw(key, size)
        for (name, size), key in zip(shape.weight_shapes.items(), keys[:-1], strict=True)
    }
    pool = jnp.full(shape.pool_shape, 0.01, jnp.bfloat16)
    x = jax.random.normal(keys[-1], (shape.batch, shape.hidden), jnp.bfloat16)
    rng = np.random.default_rng(0)
    tables = 1 + rng.permutation(shape.num_blocks - 1).reshape(shape.batch, -1)
    lens = jnp.full(shape.batch, shape.context, jnp.int32)
    return pool, x, weights, jnp.asarray(tables, jnp.int32), lens


def _prepare_engine(context: Context) -> Prepared:
    """SmolLM2's geometry through the engine; its real weights where they are cached already."""

    def run(programs: Programs) -> dict[str, Any]:
        try:
            from paged_jax import Engine, EngineConfig, SamplingParams

            model, weights = _engine_model(context)
        except ImportError as error:
            return {"status": "skipped", "reason": f"{type(error).__name__}: {error}"}
        rows, new = (2, 3) if context.rehearsal else (32, 128)
        config = EngineConfig(
            kv_dtype="bfloat16", max_num_seqs=rows, max_model_len=128 if context.rehearsal else 512
        )
        rng = np.random.default_rng(0)
        spec = model.spec
        prompts = [rng.integers(1, spec.vocab_size, size=8 + i).tolist() for i in range(rows)]
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        speeds = []
        for _ in range(1 if context.rehearsal else 3):  # the first compiles
            engine = Engine(model, config=config)
            start = time.perf_counter()
            outputs = engine.generate(prompts, params)
            tokens = sum(len(output.token_ids) for output in outputs)
            speeds.append(tokens / (time.perf_counter() - start))
        return {
            "status": "measured",
            "note": f"{speeds[-1]:.0f} tokens/s, {rows} rows, {weights} weights",
            "tokens_per_s": speeds,
            "weights": weights,
        }

    return Prepared(programs={}, run=run)


def _engine_model(context: Context) -> tuple[Any, str]:
    import models
    from models.checkpoints import cache_root
    from models.llama import LlamaConfig, as_model, random_params

    name = "smollm2-135m-instruct"
    if not context.rehearsal and any(cache_root(None).glob(f"{name}.*/config.json")):
        return models.load_model(name, dtype="bfloat16", progress=False), "real"
    config = LlamaConfig.tiny(num_layers=1) if context.rehearsal else LlamaConfig.smollm2_135m()
    params = jax.device_put(random_params(config, 0, dtype=jnp.bfloat16))
    return as_model(config, params, dtype=jnp.bfloat16), "random"
