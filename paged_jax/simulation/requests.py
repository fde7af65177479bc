"""Requests of a trace as the scheduler takes them: tokens only where they decide what is shared."""

from __future__ import annotations

from collections.abc import Sequence

from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduling.request import Request
from paged_jax.simulation.executor import STOP_TOKEN
from paged_jax.simulation.settings import SimulationSettings
from paged_jax.simulation.traces import TraceRequest

_PREFIX_TOKEN = 1
_ALONE = 2**40  # above all tokens that prefix ids stand for


class RequestMaker:
    """Makes requests, numbered from 0.

    Args:
      settings: what each is asked for.
    """

    __slots__ = ("_num_alone", "_params", "_settings")

    def __init__(self, settings: SimulationSettings) -> None:
        self._settings = settings
        self._num_alone = _ALONE
        self._params = self._make_params(max_tokens=None)

    @property
    def prefix_token_ids(self) -> list[int]:
        """What all prompts begin with."""
        return [_PREFIX_TOKEN] * self._settings.shared_prefix_len

    def make(self, request_id: int, request: TraceRequest) -> Request:
        """The request number ``request_id``.

        Raises:
          ValueError: its ``prefix_ids`` do not stand for as many tokens as its prompt has.
        """
        params = self._params
        if not self._settings.hides_lengths:
            params = self._make_params(max_tokens=request.num_output)
        prompt = self._prompt(request_id, request)
        return Request(request_id, prompt, params, expected_output=request.num_output)

    def _make_params(self, *, max_tokens: int | None) -> SamplingParams:
        settings = self._settings
        return SamplingParams(
            n=settings.num_sequences,
            beam_width=settings.beam_width,
            max_tokens=max_tokens,
            stop_token_ids=(STOP_TOKEN,) if settings.hides_lengths else (),
        )

    def _prompt(self, request_id: int, request: TraceRequest) -> list[int]:
        num_prompt, settings = request.num_prompt, self._settings
        if not settings.prefix_cache:
            return self.prefix_token_ids + [0] * num_prompt
        if not request.prefix_ids:
            begin = self._num_alone
            self._num_alone += num_prompt
            return list(range(begin, begin + num_prompt))
        tokens = request.token_ids(settings.tokens_per_id)
        if len(tokens) != num_prompt:
            raise ValueError(
                f"requests[{request_id}] has {len(request.prefix_ids)} prefix_ids of tokens_per_id="
                f"{settings.tokens_per_id}; they must stand for its {num_prompt} prompt tokens"
            )
        return tokens


def require_valid(
    requests: Sequence[TraceRequest], settings: SimulationSettings, *, max_model_len: int
) -> None:
    """Refuse requests that cannot be served.

    Raises:
      ValueError: there are none, they are not in order of arrival, or one is empty or longer than
        ``max_model_len``.
    """
    if not requests:
        raise ValueError("requests=[] must hold at least one request")
    before = 0.0
    for index, request in enumerate(requests):
        lens = settings.shared_prefix_len + request.num_prompt, request.num_output
        if request.num_prompt < 1 or request.num_output < 1 or sum(lens) > max_model_len:
            raise ValueError(
                f"requests[{index}] has {lens[0]} prompt tokens and {lens[1]} output tokens; it "
                f"must have some of both, and together at most max_model_len={max_model_len}"
            )
        if request.arrival < before:
            raise ValueError(
                f"requests[{index}] arrives at {request.arrival}, it must come at or after "
                f"{before}, when the one before it does"
            )
        before = request.arrival
