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
    )
}
