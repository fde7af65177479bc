"""Text to token ids and back, with the exact bytes of every token, and chat templates."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.checkpoints.gguf_reader import GgufFile

# What a folder's tokenizer may consist of; the first is the one that must be there.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
)
_SPACE = "\u2581"  # SentencePiece's mark
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> list[str]:
    """Return GPT-2's character for each byte: printable ones stand for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in itertools.count(0x100))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


BYTE_OF_CHAR = {char: byte for byte, char in enumerate(byte_alphabet())}


def _decoders(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps that turn tokens into text, as tokenizer.json names them."""
    decoder: Any = backend.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


class Tokenizer:
    """A tokenizer with its chat template; a ``paged_jax.model.Tokenizer``.

    Two kinds are known, by the decoder: byte-level BPE (GPT-2, Llama 3, Qwen), and SentencePiece's
    forms, BPE or unigram, where ``\u2581`` is a space and ``<0x0A>`` a byte (Llama 2, Mistral,
    Gemma, Phi-3).

    Args:
      backend: the tokenizer of the ``tokenizers`` package.
      chat_template: a jinja2 template over ``messages``, or None.
      bos_token: what the template may refer to; prepended to texts if ``add_bos_token``.
      eos_token: what the template may refer to.
      add_bos_token: whether ``encode`` starts every text with ``bos_token``.
      num_ids: ids of the model that uses it; those that are no tokens have no text. None: those
        of the tokens.

    Raises:
      ValueError: the backend is of another kind.
    """

    __slots__ = ("_added", "_backend", "_is_byte_level", "_num_ids", "_settings", "_strips_space")

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        bos_token: str = "",
        eos_token: str = "",
        add_bos_token: bool = False,
        num_ids: int | None = None,
    ) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._num_ids = max(num_ids or 0, self.vocab_size)
        self._settings: dict[str, Any] = {
            "chat_template": chat_template,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "add_bos_token": add_bos_token,
        }
        steps = _decoders(backend)
        kinds = [step["type"] for step in steps]
        model = type(backend.model).__name__
        self._is_byte_level = kinds == ["ByteLevel"]
        marks = [
            step
            for step in steps
            if (step["type"] == "Replace" and step["pattern"] == {"String": _SPACE})
            or (step["type"] == "Metaspace" and step["replacement"] == _SPACE)
        ]
        others = set(kinds) - {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
        if model not in ("BPE", "Unigram") or not (
            self._is_byte_level or (len(marks) == 1 and not others)
        ):
            raise ValueError(
                f"model {model!r} with decoder {', '.join(kinds) or None!r} must be byte-level BPE "
                "(GPT-2, Llama 3, Qwen) or SentencePiece's BPE or Unigram (Llama 2, Mistral, Gemma)"
            )
        self._strips_space = not self._is_byte_level and (
            "Strip" in kinds or marks[0].get("prepend_scheme", "never") != "never"
        )

    @classmethod
    def from_gguf(cls, file: GgufFile, *, num_ids: int | None = None) -> Tokenizer:
        """Build the tokenizer that a GGUF file describes.

        Args:
          file: the file.
          num_ids: see the class.

        Raises:
          ValueError: the file's tokenizer or pre-tokenizer is of an unknown kind, or its lists do
            not fit together.
        """
        from models.tokenizer_gguf import build_backend, read_settings

        return cls(build_backend(file), **read_settings(file), num_ids=num_ids)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, num_ids: int | None = None) -> Tokenizer:
        """Read a folder as ``save`` or Hugging Face's ``save_pretrained`` writes it.

        Args:
          folder: with tokenizer.json and, where it has them, tokenizer_config.json,
            special_tokens_map.json and chat_template.jinja.
          num_ids: see the class.

        Raises:
          ValueError: a file is missing or damaged, or of an unknown kind; the message names it.
        """
        from models.tokenizer_hf import read_backend, read_settings

        backend = read_backend(Path(folder))
        settings = read_settings(Path(folder), backend)
        try:
            return cls(backend, **settings, num_ids=num_ids)
        except ValueError as error:
            raise ValueError(f"{Path(folder) / TOKENIZER_FILES[0]}: {error}") from error

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, which transformers loads too."""
        self._backend.save(str(Path(folder) / "tokenizer.json"))
        settings = {
            name: value for name, value in self._settings.items() if value not in ("", None)
        }
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        text = json.dumps(settings, indent=1, ensure_ascii=False)
        (Path(folder) / "tokenizer_config.json").write_text(text, encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> str | None:
        """The jinja2 source of the chat template, or None."""
        return self._settings["chat_template"]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``; special tokens written out in it count as such.

        Bytes that the vocabulary lacks are dropped, as Hugging Face's tokenizer does: SmolLM2 has
        no token for U+0004, 0006, 0013, 0014, 0016 and 001D, nor for the first byte of U+40000 to
        U+BFFFF (unassigned).
        """
        ids = self._backend.encode(text, add_special_tokens=False).ids
        bos_id = self._backend.token_to_id(self._settings["bos_token"])
        if self._settings["add_bos_token"] and bos_id is not None and ids[:1] != [bos_id]:
            return [bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included; bad UTF-8 becomes U+FFFD.

        SentencePiece puts a space before a text, where the model was trained so: the text is what
        follows that space. (A text that goes on, as an engine's output does, keeps it:
        ``token_bytes``.)
        """
        if self._is_byte_level:
            return self._backend.decode(list(ids), skip_special_tokens=False)
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token, which may be a part of a UTF-8 character.

        Raises:
          ValueError: there is no such token.
        """
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            if 0 <= token_id < self._num_ids:
                return b""
            raise ValueError(f"token_id={token_id} must lie in [0, {self._num_ids})")
        if self._is_byte_level:
            if token_id in self._added:
                return token.encode()
            return bytes(BYTE_OF_CHAR[char] for char in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render a conversation to text, in jinja2's immutable sandbox.

        Args:
          messages: dicts with ``role`` and ``content``.
          add_generation_prompt: end with the header of the assistant's turn.

        Raises:
          ValueError: the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("messages: this model has no chat template; pass plain text instead")
        try:
            return _compile_template(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=self._settings["bos_token"],
                eos_token=self._settings["eos_token"],
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"messages={messages!r} must be what the chat template expects: {error}"
            ) from error


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@functools.lru_cache(maxsize=8)
def _compile_template(source: str) -> Any:
    # trim_blocks and lstrip_blocks as in Hugging Face's renderer, for which templates are written.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)
