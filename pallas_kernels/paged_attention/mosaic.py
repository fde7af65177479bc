"""`paged_attention` in Pallas Mosaic GPU: the decode kernel for few queries, else prefill."""

import dataclasses

from jaxtyping import Array, Float, Int

from pallas_kernels.devices import Device, kernel_device
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.mosaic_config import PRODUCT_DTYPES
from pallas_kernels.paged_attention.mosaic_decode import (
    paged_attention_mosaic_decode,
    unsupported_decode,
)
from pallas_kernels.paged_attention.mosaic_prefill import (
    paged_attention_mosaic_prefill,
    unsupported_prefill,
)
from pallas_kernels.paged_attention.work import Work, plan_decode_work

MAX_DECODE_TOKENS = 8  # above, a row's queries fill the tensor core's M side by themselves


def unsupported(call: AttentionCall, device: Device) -> str | None:
    """Why neither kernel can take a call on a device, or None."""
    if call.kv_dtype in PRODUCT_DTYPES and _rounds_queries(call) is not None:
        return _rounds_queries(call)
    if _decodes(call, device):
        return None
    reason = unsupported_prefill(call, device)
    if reason is not None and call.num_new <= MAX_DECODE_TOKENS:
        return unsupported_decode(call, device)  # what the user would look at first
    return reason


def paged_attention_mosaic(
    q: Float[Array, "B T H D"],
    kv_blocks: Float[Array, "N 2 K S D"],
    block_tables: Int[Array, "B M"],
    kv_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    scale: float | Array,
    window: int | Array | None,
    soft_cap: float | Array | None,
    sinks: Float[Array, "H"] | None,
    kv_scales: Float[Array, "N 2 K S"] | None,
    score_fn: None,
    work: Work | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """The semantics of `paged_attention` (see there), for calls that `unsupported` lets pass."""
    del score_fn  # refused by `unsupported`
    call = AttentionCall.of(q, kv_blocks, block_tables, window=window)
    args = (q, kv_blocks, block_tables, kv_lens, q_lens)
    options = {
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "kv_scales": kv_scales,
        "interpret": interpret,
    }
    if _decodes(call, kernel_device()):
        return paged_attention_mosaic_decode(*args, work=work, **options)
    return paged_attention_mosaic_prefill(*args, **options)


def plan(
    call: AttentionCall,
    kv_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    window: int | Array | None,
    device: Device,
) -> Work | None:
    """The work list of a step's decode calls, or None where the decode kernel will not run."""
    # As of a model that computes in the pool's type; another one's calls are not this kernel's.
    call = dataclasses.replace(call, q_dtype=PRODUCT_DTYPES.get(call.kv_dtype, call.kv_dtype))
    if not _decodes(call, device):
        return None
    return plan_decode_work(call, kv_lens, q_lens, device=device, window=window)


def _rounds_queries(call: AttentionCall) -> str | None:
    """Why the products would not be those of the queries' own type, or None."""
    if call.q_dtype == call.kv_dtype or (call.is_quantized and call.q_dtype != "float32"):
        return None
    return (
        f"queries are {call.q_dtype} and would be rounded to {call.kv_dtype}, the pool's type "
        "(cast them, if that is meant)"
    )


def _decodes(call: AttentionCall, device: Device) -> bool:
    return call.num_new <= MAX_DECODE_TOKENS and unsupported_decode(call, device) is None
