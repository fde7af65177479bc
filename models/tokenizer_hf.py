"""Tokenizers of Hugging Face folders: tokenizer.json and the settings beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

_TOKENS = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"


def read_backend(folder: Path) -> tokenizers.Tokenizer:
    """Read tokenizer.json, with the tokens that only tokenizer_config.json adds.

    Raises:
      ValueError: it is missing or damaged.
    """
    path = folder / _TOKENS
    if not path.is_file():
        raise ValueError(
            f"{path}: expected a tokenizer file, there is none; transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) makes it of other forms"
        )
    try:
        text = path.read_text(encoding="utf-8")
        backend = tokenizers.Tokenizer.from_str(text)
    except (
        Exception
    ) as error:  # the library raises plain Exception, which seldom says what is wrong
        raise ValueError(f"{path}: expected a tokenizer file: {_reason(path, error)}") from error
    for token_id, entry in sorted(_added(folder), key=lambda item: item[0]):
        if backend.id_to_token(token_id) is not None:
            continue
        backend.add_tokens([AddedToken(**entry)])
        if backend.token_to_id(entry["content"]) != token_id:
            raise ValueError(
                f"{folder / _SETTINGS}: added_tokens_decoder: {entry['content']!r} cannot be token "
                f"{token_id}: {_TOKENS} has {backend.get_vocab_size()} tokens"
            )
    return backend


def _reason(path: Path, error: Exception) -> str:
    """What is wrong with a file that the library does not read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as damage:
        return f"it is damaged: {damage}"
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        return "it has no 'model', so it is no file of the tokenizers package"
    return str(error)


def _added(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        entries = _read_json(folder / _SETTINGS).get("added_tokens_decoder", {})
        return [
            (int(key), {name: entry[name] for name in names if name in entry})
            for key, entry in entries.items()
        ]
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / _SETTINGS}: expected a tokenizer file: {error}") from error


def read_settings(folder: Path, backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return the other arguments of ``Tokenizer``.

    Whether texts begin with the beginning token is what ``add_bos_token`` says, and else what the
    post-processor does.

    Args:
      folder: with tokenizer_config.json, special_tokens_map.json and chat_template.jinja, any of
        which may be missing.
      backend: the tokenizer.

    Raises:
      ValueError: a file is damaged; the message names it.
    """
    path = folder / _SETTINGS
    values = _read_json(folder / "special_tokens_map.json") | _read_json(path)
    bos_token = _content(values.get("bos_token"), path)
    bos_id = backend.token_to_id(bos_token)
    # Folders that this library wrote earlier say add_bos.
    add_bos = values.get("add_bos_token", values.get("add_bos"))
    if add_bos is None:
        add_bos = bos_id is not None and backend.encode("a").ids[:1] == [bos_id]
    template = folder / "chat_template.jinja"
    if template.is_file():
        chat_template = template.read_text(encoding="utf-8")
    else:
        chat_template = _default_template(values.get("chat_template"), path)
    return {
        "chat_template": chat_template,
        "bos_token": bos_token,
        "eos_token": _content(values.get("eos_token"), path),
        "add_bos_token": bool(add_bos),
    }


def _read_json(path: Path) -> dict[str, Any]:
    """Return a file's entries, {} where there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: expected a tokenizer file: it is damaged: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a tokenizer file: it must be a JSON object")
    return values


def _content(value: Any, path: Path) -> str:
    """A token, which is text or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{path}: expected a tokenizer file: {value!r} must be a token's text")
    return value


def _default_template(value: Any, path: Path) -> str | None:
    """The template, or of several the one that is called default."""
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{path}: expected a tokenizer file: chat_template={value!r} must be text")
