"""Tokenizers of GGUF files, built from the vocabulary, merges and scores that they hold."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from models.checkpoints.gguf_reader import GgufFile
from models.tokenizer import BYTE_OF_CHAR

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# llama.cpp's and Hugging Face's pattern for Llama 3.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The same but for single digits: Qwen 2 and later.
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SPACE = "\u2581"


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer | None:
    match kind:
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)])
        case "gpt-2" | "default":
            return _byte_level(use_regex=True)
        case "llama-bpe" | "llama3" | "qwen2":
            pattern = _QWEN2_SPLIT if kind == "qwen2" else _LLAMA3_SPLIT
            split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])
        case _:
            return None


def build_backend(file: GgufFile) -> tokenizers.Tokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
      ValueError: it is of an unknown kind, or its lists do not fit together.
    """
    model = file.metadata("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model={model!r} must be 'gpt2' (byte-level BPE) or "
            "'llama' (SentencePiece's BPE)"
        )
    tokens: list[str] = file.metadata("tokenizer.ggml.tokens")
    types: list[int] = file.metadata("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries, expected "
            f"{len(tokens)}, one a token"
        )
    build = _byte_level_backend if model == "gpt2" else _sentencepiece_backend
    backend = build(file, tokens, types)
    backend.add_tokens(
        [
            AddedToken(token, special=token_type == _CONTROL, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (_CONTROL, _USER_DEFINED)
        ]
    )
    return backend


def read_settings(file: GgufFile) -> dict[str, Any]:
    """Return the other arguments of ``Tokenizer``."""
    is_sentencepiece = file.metadata("tokenizer.ggml.model") == "llama"
    return {
        "chat_template": file.metadata("tokenizer.chat_template", "") or None,
        "bos_token": _named_token(file, "bos_token_id"),
        "eos_token": _named_token(file, "eos_token_id"),
        "add_bos_token": bool(file.metadata("tokenizer.ggml.add_bos_token", is_sentencepiece)),
    }


def _byte_level_backend(
    file: GgufFile, tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    kind = file.metadata("tokenizer.ggml.pre", "default")
    pre_tokenizer = _pre_tokenizer(kind)
    if pre_tokenizer is None:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre={kind!r} must be 'smollm', 'gpt-2', 'default', "
            "'llama-bpe', 'llama3' or 'qwen2'"
        )
    for token, token_type in zip(tokens, types, strict=True):
        if token_type not in (_CONTROL, _USER_DEFINED) and not BYTE_OF_CHAR.keys() >= {*token}:
            raise ValueError(
                f"{file.path}: tokenizer.ggml.tokens: {token!r} must consist of characters of the "
                "byte-level alphabet"
            )
    merges = [tuple(pair.split(" ")) for pair in file.metadata("tokenizer.ggml.merges")]
    # Llama 3 emits a word that is in the vocabulary whole, whatever the merges say.
    backend = _bpe(file, tokens, merges, ignore_merges=kind in ("llama-bpe", "llama3"))
    backend.pre_tokenizer = pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _sentencepiece_backend(
    file: GgufFile, tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    scores: list[float] = file.metadata("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries, expected "
            f"{len(tokens)}, one a token"
        )
    if missing := [code for code in range(256) if f"<0x{code:02X}>" not in tokens[:1024]]:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.tokens must have a token for every byte, "
            f"'<0x{missing[0]:02X}>' is missing"
        )
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    backend = _bpe(
        file,
        tokens,
        _merges_of_scores(tokens, scores, types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    adds_space = bool(file.metadata("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    prefix = [normalizers.Prepend(_SPACE)] if adds_space else []
    backend.normalizer = normalizers.Sequence([*prefix, spaces])  # pyright: ignore[reportAttributeAccessIssue]
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence([*steps, *strip])  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _merges_of_scores(
    tokens: list[str], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Return the merges that make each token of two others, those of better tokens first.

    SentencePiece joins the neighbours whose union has the best score: the rank of a merge is the
    score of what it makes.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    found = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL):
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(ids[left], ids[right]) for left, right in pairs if left in ids and right in ids]
        found += [(-score, *pair) for pair in known]
    # Ties in the order of the vocabulary, for found's order is kept.
    found.sort(key=lambda entry: entry[0])
    return [(tokens[left], tokens[right]) for _, left, right in found]


def _bpe(
    file: GgufFile, tokens: list[str], merges: list[tuple[str, ...]], **options: Any
) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **options))  # pyright: ignore[reportArgumentType]
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"{file.path}: tokenizer.ggml.merges must join tokens of the vocabulary: {error}"
        ) from error


def _named_token(file: GgufFile, name: str) -> str:
    key = f"tokenizer.ggml.{name}"
    if not file.has(key):
        return ""
    tokens = file.metadata("tokenizer.ggml.tokens")
    token_id = file.metadata(key)
    if token_id >= len(tokens):
        raise ValueError(f"{file.path}: {key}={token_id} must lie in [0, {len(tokens)})")
    return tokens[token_id]
