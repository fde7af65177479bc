"""Byte-level BPE tokenizers, built from the vocabulary and merges that a GGUF file holds."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from models.checkpoints.gguf_reader import GgufFile

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4

# llama.cpp's and Hugging Face's pattern for Llama 3.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer | None:
    match kind:
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)])
        case "gpt-2" | "default":
            return _byte_level(use_regex=True)
        case "llama-bpe" | "llama3":
            split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
            return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])
        case _:
            return None


def byte_alphabet() -> list[str]:
    """Return GPT-2's character for each byte: printable ones stand for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in itertools.count(0x100))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(byte_alphabet())}


def _vocabulary(file: GgufFile) -> tuple[list[str], list[AddedToken]]:
    """Return all tokens by id, and those that texts may name but merges never make."""
    model = file.metadata("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model={model!r} must be 'gpt2' (byte-level BPE)"
        )
    tokens: list[str] = file.metadata("tokenizer.ggml.tokens")
    types: list[int] = file.metadata("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries, expected "
            f"{len(tokens)}, one a token"
        )
    added = []
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            special = token_type == _CONTROL
            added.append(AddedToken(token, special=special, normalized=False))
        elif not _BYTE_OF_CHAR.keys() >= {*token}:
            raise ValueError(
                f"{file.path}: tokenizer.ggml.tokens: {token!r} must consist of characters of the "
                "byte-level alphabet"
            )
    return tokens, added


def _bpe(file: GgufFile, tokens: list[str], kind: str) -> models.BPE:
    merges = [tuple(pair.split(" ")) for pair in file.metadata("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3 emits a word that is in the vocabulary whole, whatever the merges say.
    ignore_merges = kind in ("llama-bpe", "llama3")
    try:
        return models.BPE(vocabulary, merges, ignore_merges=ignore_merges)  # pyright: ignore[reportArgumentType]
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"{file.path}: tokenizer.ggml.merges must join tokens of the vocabulary: {error}"
        ) from error


def _named_token(file: GgufFile, tokens: list[str], name: str) -> str:
    key = f"tokenizer.ggml.{name}"
    if not file.has(key):
        return ""
    token_id = file.metadata(key)
    if token_id >= len(tokens):
        raise ValueError(f"{file.path}: {key}={token_id} must lie in [0, {len(tokens)})")
    return tokens[token_id]


class Tokenizer:
    """A byte-level BPE tokenizer with its chat template; a ``paged_jax.model.Tokenizer``.

    Args:
      backend: the tokenizer of the ``tokenizers`` package.
      chat_template: a jinja2 template over ``messages``, or None.
      bos_token: what the template may refer to; prepended to texts if ``add_bos``.
      eos_token: what the template may refer to.
      add_bos: whether ``encode`` starts every text with ``bos_token``.
    """

    __slots__ = ("_added", "_backend", "_settings")

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        bos_token: str = "",
        eos_token: str = "",
        add_bos: bool = False,
    ) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._settings: dict[str, Any] = {
            "chat_template": chat_template,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "add_bos": add_bos,
        }

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        """Build the tokenizer that a GGUF file describes.

        Raises:
          ValueError: the file's tokenizer is not byte-level BPE, its pre-tokenizer is unknown, or
            its lists do not fit together.
        """
        kind = file.metadata("tokenizer.ggml.pre", "default")
        pre_tokenizer = _pre_tokenizer(kind)
        if pre_tokenizer is None:
            raise ValueError(
                f"{file.path}: tokenizer.ggml.pre={kind!r} must be 'smollm', 'gpt-2', 'default', "
                "'llama-bpe' or 'llama3'"
            )
        tokens, added = _vocabulary(file)
        backend = tokenizers.Tokenizer(_bpe(file, tokens, kind))
        backend.pre_tokenizer = pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        backend.add_tokens(added)
        return cls(
            backend,
            chat_template=file.metadata("tokenizer.chat_template", "") or None,
            bos_token=_named_token(file, tokens, "bos_token_id"),
            eos_token=_named_token(file, tokens, "eos_token_id"),
            add_bos=bool(file.metadata("tokenizer.ggml.add_bos_token", False)),
        )

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Read what ``save`` wrote.

        Raises:
          ValueError: a file is missing or damaged; the message names it.
        """
        path = Path(folder) / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
            path = Path(folder) / "tokenizer_config.json"
            return cls(backend, **json.loads(path.read_text(encoding="utf-8")))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path}: expected a tokenizer file: {error}") from error

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json`` (of the ``tokenizers`` package) and our settings beside it."""
        self._backend.save(str(Path(folder) / "tokenizer.json"))
        settings = json.dumps(self._settings, indent=1, ensure_ascii=False)
        (Path(folder) / "tokenizer_config.json").write_text(settings, encoding="utf-8")

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
        if self._settings["add_bos"] and bos_id is not None and ids[:1] != [bos_id]:
            return [bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included; bad UTF-8 becomes U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token, which may be a part of a UTF-8 character.

        Raises:
          ValueError: there is no such token.
        """
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise ValueError(f"token_id={token_id} must lie in [0, {self.vocab_size})")
        if token_id in self._added:
            return token.encode()
        return bytes(_BYTE_OF_CHAR[char] for char in token)

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
