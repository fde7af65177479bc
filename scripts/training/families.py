"""The families that can be trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from models import llama


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What training needs of a family."""

    name: str
    config_class: type[Any]
    module_class: Callable[..., Any]
    param_shapes: Callable[[Any], Any]
    as_model: Callable[..., Any]


FAMILIES = {
    "llama": Family(
        name="llama",
        config_class=llama.LlamaConfig,
        module_class=llama.Llama,
        param_shapes=llama.param_shapes,
        as_model=llama.as_model,
    )
}
