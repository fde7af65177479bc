"""Head shapes of known models, by name: what tests, benchmarks and tuners measure on."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Query heads (H), key/value heads (K) and head dim (D) of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


HEAD_SHAPES = {
    shape.name: shape
    for shape in (
        HeadShape(name="toy", num_heads=4, num_kv_heads=2, head_dim=16),
        HeadShape(name="smollm2", num_heads=9, num_kv_heads=3, head_dim=64),
        HeadShape(name="llama3-8b", num_heads=32, num_kv_heads=8, head_dim=128),
        # One of eight tensor-parallel shards.
        HeadShape(name="llama3-70b/8", num_heads=8, num_kv_heads=1, head_dim=128),
        HeadShape(name="gemma3-1b", num_heads=4, num_kv_heads=1, head_dim=256),
        HeadShape(name="gemma3-4b", num_heads=8, num_kv_heads=4, head_dim=256),
        HeadShape(name="gemma3-12b", num_heads=16, num_kv_heads=8, head_dim=256),
        HeadShape(name="gemma3-27b", num_heads=32, num_kv_heads=16, head_dim=128),
    )
}
