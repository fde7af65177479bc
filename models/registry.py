"""All families, by the name that checkpoints and Hugging Face folders give them."""

from __future__ import annotations

from models.common.family import Family, GgufFormat
from models.gemma2 import GEMMA2
from models.gemma3 import GEMMA3, GEMMA3_IMAGE_TEXT
from models.llama import LLAMA
from models.mistral import MISTRAL
from models.qwen2 import QWEN2
from models.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, GEMMA3_IMAGE_TEXT)
}


def family_of(model_type: str, *, where: object) -> Family:
    """Return the family that serves a Hugging Face ``model_type``.

    Args:
      model_type: as in config.json.
      where: the file, for the message.

    Raises:
      ValueError: there is none.
    """
    for family in FAMILIES.values():
        if model_type in family.hf_types:
            return family
    known = sorted(name for family in FAMILIES.values() for name in family.hf_types)
    raise ValueError(
        f"{where}: model_type={model_type!r} must be one of {', '.join(map(repr, known))}"
    )


def family_of_gguf(architecture: str, *, where: object) -> tuple[Family, GgufFormat]:
    """Return the family that serves a GGUF file's ``general.architecture``, and its form there.

    Args:
      architecture: as in the file.
      where: the file, for the message.

    Raises:
      ValueError: there is none.
    """
    forms = [(family, family.gguf) for family in FAMILIES.values() if family.gguf is not None]
    for family, form in forms:
        if architecture in form.architectures:
            return family, form
    known = sorted(name for _, form in forms for name in form.architectures)
    raise ValueError(
        f"{where}: general.architecture={architecture!r} must be one of "
        f"{', '.join(map(repr, known))}"
    )
