"""Who is compared at decode attention: our backends, dense caches, and other libraries' kernels."""

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.call import AttentionCall

DISTINCT_VALUES = 2**23  # random numbers drawn on the host; blocks repeat after these
CHANGE = 1e-6  # of the queries from call to call: a dependency, no other input


class NotHereError(Exception):
    """A library that is not installed, or has no GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """One shape's arrays (or only their shapes): sets of rows in one pool, all of full length.

    Attributes:
        call: shapes and dtypes; the pool holds all sets.
        sets: how many.
        q: [B, 1, H, D].
        pool: [N, 2, K, S, D].
        tables: i32[sets, B, M].
    """

    call: AttentionCall
    sets: int
    q: Any
    pool: Any
    tables: Any

    @classmethod
    def spec(cls, call: AttentionCall, sets: int) -> "Data":
        """The shapes alone."""
        B, H, K, D = call.num_rows, call.num_heads, call.num_kv_heads, call.head_dim
        shape = jax.ShapeDtypeStruct
        return cls(
            call=call,
            sets=sets,
            q=shape((B, 1, H, D), call.q_dtype),
            pool=shape((call.num_blocks, 2, K, call.block_size, D), call.kv_dtype),
            tables=shape((sets, B, call.table_width), jnp.int32),
        )

    def make(self) -> "Data":
        """Draw values: a pool of random blocks, some of them alike, in shuffled tables."""
        rng = np.random.default_rng(0)
        num_blocks, *block = self.pool.shape
        distinct = min(num_blocks, max(7, DISTINCT_VALUES // int(np.prod(block))))
        base = jnp.asarray(rng.standard_normal((distinct, *block), np.float32), self.pool.dtype)
        pool = jax.jit(lambda x: x[jnp.arange(num_blocks) % distinct])(base)
        tables = 1 + rng.permutation(self.tables.size).reshape(self.tables.shape)
        q = rng.standard_normal(self.q.shape, np.float32)
        return dataclasses.replace(
            self,
            q=jnp.asarray(q, self.q.dtype),
            pool=pool,
            tables=jnp.asarray(tables, jnp.int32),
        )

    @property
    def num_tokens(self) -> int:
        """Positions a row: all of its table."""
        return self.call.table_width * self.call.block_size


type Attend = Callable[[jax.Array, Any, Any], jax.Array]  # (q, view, set) -> [B, 1, H, D]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to compute decode attention.

    Attributes:
        layout: "pool", "dense" or "pages"; contenders of one layout share its arrays.
        view: the arrays of that layout, of values or of shapes.
        attend: makes `(q, view, set) -> out`; the set is traced for "pool" and "pages".
        own_layout: XLA chooses how the view's axes lie in memory, and gets a copy that does: else
            it would transpose the whole cache before the loop, on the clock.
    """

    layout: str
    view: Callable[[Data], Any]
    attend: Callable[[Data, bool], Attend]
    own_layout: bool = False


def chain(attend: Attend, *, turns: int, sets: int, own_layout: bool = False) -> Any:
    """`(q, view) -> the last call's output`, jitted, of `turns * sets` dependent calls.

    Dense views are tuples of a set's arrays: their calls are unrolled over the sets (a dynamic
    slice would copy them). The barrier keeps what a call derives from keys and values in the loop.
    """

    def step(q: jax.Array, view: Any, index: Any) -> tuple[jax.Array, jax.Array]:
        out = attend(q, view, index)
        return q + (CHANGE * out).astype(q.dtype), out

    def run(q: jax.Array, view: Any) -> jax.Array:
        def body(i: Any, carry: Any) -> Any:
            q, out = carry
            if isinstance(view, tuple):
                for arrays in view:
                    q, arrays = jax.lax.optimization_barrier((q, arrays))
                    q, out = step(q, arrays, None)
                return q, out
            q, big = jax.lax.optimization_barrier((q, view["big"]))
            return step(q, {**view, "big": big}, i % sets)

        calls = turns if isinstance(view, tuple) else turns * sets
        return jax.lax.fori_loop(0, calls, body, (q, jnp.zeros_like(q)))[1]

    if own_layout:
        return jax.jit(run, in_shardings=(None, Format(Layout.AUTO)))
    return jax.jit(run)


def pool_view(data: Data) -> dict[str, Any]:
    """The pool and its tables as they are."""
    return {"big": data.pool, "tables": data.tables}


def dense_view(data: Data) -> tuple[Any, ...]:
    """Keys and values [B, C, K, D] of each set."""

    def gather(pool: jax.Array, table: jax.Array, index: int) -> jax.Array:
        x = pool[table, index]  # [B, M, K, S, D]
        x = x.swapaxes(2, 3)  # [B, M, S, K, D]
        return x.reshape(x.shape[0], -1, *x.shape[3:])  # [B, C, K, D]

    if isinstance(data.pool, jax.ShapeDtypeStruct):
        shape = (data.call.num_rows, data.num_tokens, *data.pool.shape[2::2])
        return ((jax.ShapeDtypeStruct(shape, data.pool.dtype),) * 2,) * data.sets
    gather_one = jax.jit(gather, static_argnums=2)
    return tuple(tuple(gather_one(data.pool, t, i) for i in (0, 1)) for t in data.tables)


def pages_view(data: Data) -> dict[str, Any]:
    """Keys and values [K, N, S, D], as JAX's own kernel takes them."""

    def split(pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pool[:, 0].swapaxes(0, 1), pool[:, 1].swapaxes(0, 1)

    is_spec = isinstance(data.pool, jax.ShapeDtypeStruct)
    big = jax.eval_shape(split, data.pool) if is_spec else jax.jit(split)(data.pool)
    return {"big": big, "tables": data.tables}


def _paged(data: Data, interpret: bool, *, backend: str) -> Attend:
    lens = np.full(data.call.num_rows, data.num_tokens, np.int32)
    ones = np.ones(data.call.num_rows, np.int32)

    def attend(q: jax.Array, view: Any, index: Any) -> jax.Array:
        out = paged_attention(
            q,
            view["big"],
            view["tables"][index],
            jnp.asarray(lens),
            jnp.asarray(ones),
            backend=backend,
            interpret=interpret,
        )
        assert isinstance(out, jax.Array)  # no lse was asked for
        return out

    return attend


def _dense(data: Data, interpret: bool, *, implementation: Any) -> Attend:
    if implementation == "cudnn" and interpret:
        raise NotHereError("cudnn needs a GPU")
    lens = np.full(data.call.num_rows, data.num_tokens, np.int32)

    def attend(q: jax.Array, view: Any, index: Any) -> jax.Array:
        k, v = view
        return jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=lens, implementation=implementation
        )

    return attend


def _jax_paged(data: Data, interpret: bool) -> Attend:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # deprecated: hence the comparison
        module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    lens = np.full(data.call.num_rows, data.num_tokens, np.int32)
    width = data.call.table_width
    splits = next(n for n in (16, 8, 4, 2, 1) if width % n == 0)
    pages = next(n for n in (8, 4, 2, 1) if (width // splits) % n == 0)

    def attend(q: jax.Array, view: Any, index: Any) -> jax.Array:
        out = module.paged_attention(
            q[:, 0] * jnp.asarray(data.call.head_dim**-0.5, q.dtype),  # it does not scale
            *view["big"],
            view["tables"][index],
            jnp.asarray(lens),
            k_splits=splits,
            pages_per_compute_block=pages,
            interpret=interpret,
        )
        return out[:, None]

    return attend


def _empty(data: Data, interpret: bool) -> Attend:
    """What the loop costs by itself: a table's slice and the queries' change."""
    return lambda q, view, index: q + view["tables"][index].sum().astype(q.dtype)


CONTENDERS = {
    **{
        name: Contender(
            layout="pool", view=pool_view, attend=functools.partial(_paged, backend=name)
        )
        for name in ("mosaic", "triton", "xla")
    },
    "empty": Contender(layout="pool", view=pool_view, attend=_empty),
    **{
        f"dense {name}": Contender(
            layout="dense",
            view=dense_view,
            attend=functools.partial(_dense, implementation=name),
            own_layout=name == "xla",
        )
        for name in ("xla", "cudnn")
    },
    "jax paged": Contender(layout="pages", view=pages_view, attend=_jax_paged),
}


def _torch() -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise NotHereError(f"torch: {error}") from error
    if not torch.cuda.is_available():
        raise NotHereError("torch sees no GPU")
    return torch


def torch_sdpa(data: Data, views: dict[str, Any], turns: int) -> Callable[[], np.ndarray]:
    """torch's scaled_dot_product_attention on the dense caches, launched call by call."""
    torch = _torch()
    if "dense" not in views:
        raise NotHereError("no dense cache fits")
    q = torch.from_dlpack(data.q).transpose(1, 2)  # [B, H, 1, D]
    caches = [tuple(torch.from_dlpack(x).transpose(1, 2) for x in pair) for pair in views["dense"]]
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> np.ndarray:
        out = q
        for _ in range(turns):
            for k, v in caches:
                out = attend(q, k, v, enable_gqa=True)
        torch.cuda.synchronize()
        return out.transpose(1, 2).float().cpu().numpy()

    return run


def flashinfer_decode(data: Data, views: dict[str, Any], turns: int) -> Callable[[], np.ndarray]:
    """FlashInfer's batched decode on our own pool ("HND" is its layout), planned before."""
    torch = _torch()
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        raise NotHereError(f"flashinfer: {error}") from error
    call = data.call
    pool, q = torch.from_dlpack(data.pool), torch.from_dlpack(data.q)[:, 0].contiguous()
    wrappers = []
    for table in np.asarray(data.tables):
        workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
        rows = torch.arange(call.num_rows + 1, dtype=torch.int32, device="cuda")
        wrapper.plan(
            rows * call.table_width,
            torch.tensor(table.reshape(-1), dtype=torch.int32, device="cuda"),
            torch.full((call.num_rows,), call.block_size, dtype=torch.int32, device="cuda"),
            call.num_heads,
            call.num_kv_heads,
            call.head_dim,
            call.block_size,
            q_data_type=q.dtype,
            kv_data_type=pool.dtype,
        )
        wrappers.append(wrapper)

    def run() -> np.ndarray:
        out = q
        for _ in range(turns):
            for wrapper in wrappers:
                out = wrapper.run(q, pool)
        torch.cuda.synchronize()
        return out[:, None].float().cpu().numpy()

    return run


TORCH_CONTENDERS = {"torch sdpa": torch_sdpa, "flashinfer": flashinfer_decode}
