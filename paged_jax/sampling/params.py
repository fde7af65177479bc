"""What a request asks of the sampler and of the end of its output (host only, no jax)."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from paged_jax.config import require

GREEDY_TEMPERATURE = 1e-5
"""At or below this temperature the best token is taken: no division by (almost) zero."""

MAX_LOGPROBS = 20
MAX_BIASES = 300
MAX_STOP_TOKENS = 128

_FLOAT32_MAX = 3.4e38


def _int(name: str, value: Any, low: int, high: int | None = None) -> int:
    upto = "" if high is None else f" and <= {high}"
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    ok = is_int and int(value) >= low and (high is None or int(value) <= high)
    require(ok, f"{name}={value!r} must be an integer >= {low}{upto}")
    return int(value)


def _float(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    ok = is_real and low <= float(value) <= high and not (above and value == low)
    sign = ">" if above else ">="
    require(ok, f"{name}={value!r} must be a number {sign} {low} and <= {high}")
    return float(value)


def _bool(name: str, value: Any) -> bool:
    require(isinstance(value, bool), f"{name}={value!r} must be True or False")
    return value


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    is_pairs = isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in value
    )
    require(
        isinstance(value, Mapping) or is_pairs,
        f"logit_bias={value!r} must map token ids to numbers",
    )
    pairs = value.items() if isinstance(value, Mapping) else value
    checked = sorted(
        (_int("logit_bias id", token, 0), _float(f"logit_bias[{token}]", bias, -100, 100))
        for token, bias in pairs
    )
    require(
        len({token for token, _ in checked}) == len(checked),
        f"logit_bias={value!r} must name each token once",
    )
    require(
        len(checked) <= MAX_BIASES,
        f"logit_bias has {len(checked)} entries, must have at most {MAX_BIASES}",
    )
    return tuple(checked)


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    ok = isinstance(strings, Iterable) and not isinstance(strings, bytes)
    items: tuple[Any, ...] = tuple(strings) if ok else ()
    require(
        ok and all(isinstance(item, str) and item for item in items),
        f"stop={value!r} must be a string or strings, none of them empty",
    )
    return tuple(dict.fromkeys(items))


def _stop_ids(value: Any) -> tuple[int, ...]:
    ok = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    require(ok, f"stop_token_ids={value!r} must be a sequence of token ids")
    ids = sorted({_int("stop_token_ids entry", token, 0) for token in value})
    require(
        len(ids) <= MAX_STOP_TOKENS,
        f"stop_token_ids has {len(ids)} entries, must have at most {MAX_STOP_TOKENS}",
    )
    return tuple(ids)


def _beam_fields(params: SamplingParams) -> dict[str, Any]:
    """The clean fields of beam search; refuses whatever has no meaning with or without beams."""
    early = params.early_stopping
    require(
        isinstance(early, bool) or early == "never",
        f"early_stopping={early!r} must be True, False or 'never'",
    )
    penalty = _float("length_penalty", params.length_penalty, -10, 10)
    if params.beam_width is None:
        require(
            penalty == 1.0 and early is False,
            f"length_penalty={penalty} and early_stopping={early!r} must be 1.0 and False without "
            "beam_width",
        )
        return {}
    width = _int("beam_width", params.beam_width, 1)
    require(params.n <= width, f"n={params.n} must be at most beam_width={width}")
    require(params.max_tokens != 0, f"max_tokens=0 must be >= 1 with beam_width={width}")
    require(
        params.temperature in (0, 1),
        f"temperature={params.temperature} must be 0 or 1 with beam_width={width}: beams are "
        "ranked by the model's own probabilities, without chance",
    )
    neutral = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,), "repetition_penalty": (1,)}
    neutral |= {"presence_penalty": (0,), "frequency_penalty": (0,)}
    neutral |= {"best_of": (None,), "logprobs": (None,), "stop": ((),)}
    for name, values in neutral.items():
        value = getattr(params, name)
        require(value in values, f"{name}={value!r} must be {values[0]!r} with beam_width={width}")
    return {"beam_width": width, "length_penalty": penalty}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and where its output ends.

    The logits pass, in this order: ``logit_bias``, penalties (repetition, presence, frequency),
    ``temperature``, ``min_p``, ``top_k``, ``top_p``. Each filter acts on what the one before it
    kept, with probabilities renormalised over that; at least the best token is always kept.
    Equal logits rank by token id, the lower one first.

    Attributes:
      n: completions of the prompt, at least 1. The prompt is computed and stored once; each
        completion has a random stream of its own, keyed by (seed, its index).
      best_of: None: ``n``; more: so many completions are computed, and the ``n`` with the highest
        log-probability per token are given back, best first, when all have ended.
      beam_width: None, or search with so many beams (docs/beam_search.md): the ``n`` sequences with
        the best score are given back, best first, when the search has ended. Chance plays no part.
      length_penalty: with beams, score = sum of log-probabilities / length ** this, in [-10, 10];
        0: the plain sum; the larger, the longer.
      early_stopping: with beams, when to end once ``beam_width`` sequences have: True: at once;
        False: when the best beam, at its length now, does not beat the worst of them; "never": when
        it could not at any length up to ``max_tokens``.
      temperature: >= 0; up to 1e-5 the best token is taken (greedy).
      top_k: keep the k best; 0 or -1: all; more than the vocabulary: all.
      top_p: keep the fewest best tokens whose probability reaches this, in [0, 1]; 0: the best.
      min_p: keep tokens at least this likely, relative to the best one, in [0, 1].
      repetition_penalty: in (0, 10]; for every token of the prompt or output, a positive logit is
        divided by it and a negative one multiplied.
      presence_penalty: in [-2, 2]; subtracted once for every token in the output so far.
      frequency_penalty: in [-2, 2]; subtracted for each time a token is in the output so far.
      logit_bias: token id to a number in [-100, 100], at most 300; kept as sorted pairs.
      seed: 0 .. 2^64 - 1: the same tokens whatever else runs; None: the engine draws one.
      max_tokens: tokens to generate; None: as many as fit; 0: only score the prompt.
      min_tokens: no end-of-sequence and no stop token id is sampled before so many tokens.
      stop: strings that end the output, which is cut there.
      stop_token_ids: tokens that end the output, at most 128, whatever ``ignore_eos`` says.
      ignore_eos: the model's end-of-sequence tokens do not end the output.
      include_stop_str_in_output: leave the matched stop string in the text.
      logprobs: None, or 0..20: log-probabilities of the sampled and so many best tokens, from
        the model's own logits, before any bias, penalty, temperature or filter.
      prompt_logprobs: the same for the tokens of the prompt.

    Raises:
      ValueError: a field is not of its type or outside its range.

    >>> SamplingParams(temperature=0.0).is_greedy
    True
    >>> SamplingParams(logit_bias={7: -2.0, 3: 1}).logit_bias
    ((3, 1.0), (7, -2.0))
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        clean: dict[str, Any] = {
            "n": _int("n", self.n, 1),
            "temperature": _float("temperature", self.temperature, 0, _FLOAT32_MAX),
            "top_k": _int("top_k", self.top_k, -1),
            "top_p": _float("top_p", self.top_p, 0, 1),
            "min_p": _float("min_p", self.min_p, 0, 1),
            "repetition_penalty": _float(
                "repetition_penalty", self.repetition_penalty, 0, 10, above=True
            ),
            "presence_penalty": _float("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": _float("frequency_penalty", self.frequency_penalty, -2, 2),
            "logit_bias": _biases(self.logit_bias),
            "min_tokens": _int("min_tokens", self.min_tokens, 0),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _stop_ids(self.stop_token_ids),
            "ignore_eos": _bool("ignore_eos", self.ignore_eos),
            "include_stop_str_in_output": _bool(
                "include_stop_str_in_output", self.include_stop_str_in_output
            ),
        }
        optional = {"seed": 2**64 - 1, "max_tokens": None}
        optional |= {"logprobs": MAX_LOGPROBS, "prompt_logprobs": MAX_LOGPROBS}
        for name, high in optional.items():
            value = getattr(self, name)
            clean[name] = None if value is None else _int(name, value, 0, high)
        require(
            clean["max_tokens"] is None or clean["min_tokens"] <= clean["max_tokens"],
            f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}",
        )
        if self.best_of is not None:
            clean["best_of"] = _int("best_of", self.best_of, 1)
            require(
                clean["best_of"] >= clean["n"],
                f"best_of={self.best_of} must be at least n={self.n}",
            )
        require(
            clean["max_tokens"] != 0 or clean.get("best_of", clean["n"]) == 1,
            f"n={self.n} and best_of={self.best_of} must be 1 or None with max_tokens=0: nothing "
            "is sampled",
        )
        for name, value in clean.items():
            object.__setattr__(self, name, value)
        for name, value in _beam_fields(self).items():
            object.__setattr__(self, name, value)

    @property
    def num_samples(self) -> int:
        """Sequences that are computed at a time."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """Whether only the likeliest of the sampled completions are given back."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def num_logprobs(self) -> int | None:
        """Best tokens whose log-probabilities the sampler reports with its own; None: neither."""
        return 0 if self.logprobs is None and self.is_ranked else self.logprobs

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are chosen without chance."""
        return self.beam_width is not None or self.temperature <= GREEDY_TEMPERATURE

    @property
    def needs_penalties(self) -> bool:
        """Whether choosing a token needs the counts of the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as it is kept: (token id, bias) pairs, ids ascending."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    def validate_for(self, vocab_size: int) -> None:
        """Check the token ids against a model's vocabulary.

        Raises:
          ValueError: an id of ``logit_bias`` or ``stop_token_ids`` is not below ``vocab_size``.
        """
        named = {
            "logit_bias": [token for token, _ in self.bias_pairs],
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in named.items():
            bad = [token for token in ids if token >= vocab_size]
            require(not bad, f"{name} ids {bad} must be below the vocabulary size {vocab_size}")
