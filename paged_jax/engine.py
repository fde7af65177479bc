"""The engine and the ways to use it: all at once, as a stream, or step by step."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.config import require
from paged_jax.engine_core import EngineCore
from paged_jax.output_stream import OutputStream
from paged_jax.outputs import PrefixHandle, RequestOutput
from paged_jax.prompts import Prompt, as_prompt_list
from paged_jax.sampling.params import SamplingParams

Params = SamplingParams | SequenceOf[SamplingParams] | None


class Engine(EngineCore):
    """Continuous batching over a paged KV pool.

    Args:
      model: what to run (``models.load_model``, or your own ``Model``).
      config: sizes and behaviour.

    Attributes:
      config: as given.
      model: as given.
      num_blocks: blocks of the pool, the null block included.
      max_model_len: longest context in tokens.
      block_manager: owns the block tables.
      scheduler: decides what each step computes.
      executor: owns the pool and the row state on the device.
      stats: totals.
      event_log: the event record (docs/events.md), or None.

    Raises:
      ValueError: the settings do not fit the model.

    One thread may use an engine at a time. After an exception inside a step the pool's content is
    unknown: every later call says so, and a new engine must be made.
    """

    def add_requests(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: Params = None,
        *,
        cache_salt: str | None = None,
    ) -> list[str]:
        """Queue several prompts, or none of them if one is refused.

        Args:
          prompts: texts or lists of token ids; one alone is a list of one.
          params: one for all, or one each.
          cache_salt: see ``add_request``; one for all.

        Raises:
          ValueError: see ``add_request``, or the numbers of prompts and parameters differ.
        """
        prompt_list = as_prompt_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params_list = [params or SamplingParams()] * len(prompt_list)
        else:
            require(
                isinstance(params, Iterable) and not isinstance(params, dict | str),
                f"params={params!r} must be SamplingParams, a list of them, or None",
            )
            params_list = list(params)
        require(
            len(params_list) == len(prompt_list),
            f"params has {len(params_list)} entries, must have one a prompt ({len(prompt_list)})",
        )
        request_ids: list[str] = []
        try:
            for index, (prompt, one) in enumerate(zip(prompt_list, params_list, strict=True)):
                try:
                    request_ids.append(self.add_request(prompt, one, cache_salt=cache_salt))
                except ValueError as error:
                    raise ValueError(f"prompts[{index}]: {error}") from error
        except BaseException:
            self._discard(set(request_ids))
            raise
        return request_ids

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: Params = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end; arguments and errors as for ``add_requests``.

        Returns:
          The last output of each, in the order of the prompts.
        """
        request_ids = self.add_requests(prompts, params, cache_salt=cache_salt)
        final = {out.request_id: out for out in self.run(request_ids) if out.finished}
        return [final[request_id] for request_id in request_ids]

    def stream(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: Params = None,
        *,
        cache_salt: str | None = None,
    ) -> OutputStream:
        """Queue prompts and return an iterator over their outputs, as they come.

        Arguments and errors as for ``add_requests``; to know which output is whose, call that and
        ``run``.
        """
        return self.run(self.add_requests(prompts, params, cache_salt=cache_salt))

    def run(self, request_ids: str | SequenceOf[str]) -> OutputStream:
        """Return an iterator that steps until the named requests have ended.

        Outputs of other requests are kept for whoever asks next. Closing the iterator early
        cancels what is left of the named ones.

        Raises:
          ValueError: an id that the engine does not know, or whose last output was given.
        """
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        known = self._by_id.keys() | {output.request_id for output in self._ready}
        unknown = [name for name in names if name not in known]
        require(not unknown, f"request_ids {unknown[:5]} are not in the engine")
        named = {name: self._by_id.get(name) for name in names}

        def is_own(output: RequestOutput) -> bool:
            # An id may have belonged to another request, whose last output is not taken yet.
            live = named.get(output.request_id)
            return live is None or output.arrival_time == live.arrival_time

        def discard(request_ids: set[str]) -> None:
            # An id may belong to another request by now: that one is not the stream's.
            mine = {name for name in request_ids if self._by_id.get(name) is named[name]}
            self._discard(mine, is_own=is_own)

        step = functools.partial(self._step_for, is_own=is_own)
        return OutputStream(named, step=step, discard=discard)

    def register_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> PrefixHandle:
        """Compute a prefix and keep it resident (paper section 4.4), until ``unregister_prefix``.

        Requests whose prompts begin with it compute only what follows; its partly filled last
        block is copied for them. The engine steps until it is computed; outputs of other requests
        are kept for whoever asks next.

        Args:
          prompt: text or token ids, as for ``add_request``. What follows a text must not change how
            its end is tokenized: a prompt shares the token ids that are equal.
          cache_salt: only requests with the same one share it.

        Raises:
          ValueError: as ``add_request``, or the pool beside it would not hold what a live request
            may come to need, or nothing at all; or the engine's ``reservation`` shares nothing.
        """
        require(
            self.config.reservation == "paged",
            f"reservation={self.config.reservation!r} must be 'paged' for registered prefixes",
        )
        params = SamplingParams(max_tokens=0)
        live = self._add(prompt, params, cache_salt=cache_salt, is_prefix=True)
        self._step_for({live.request_id})
        prefix_id = live.sequence.request.pin_id
        assert prefix_id is not None
        handle = PrefixHandle(
            prefix_id=prefix_id, token_ids=live.prompt_token_ids, cache_salt=cache_salt
        )
        self._prefixes.add(handle)
        return handle

    def unregister_prefix(self, handle: PrefixHandle) -> None:
        """Let go of a registered prefix: from now on it is cached like anything else.

        Raises:
          ValueError: it is not registered in this engine (any more).
        """
        require(
            isinstance(handle, PrefixHandle) and handle in self._prefixes,
            f"handle={reprlib.repr(handle)} must be one that register_prefix of this engine gave, "
            "not yet unregistered",
        )
        self._prefixes.remove(handle)
        self.block_manager.unpin(handle.prefix_id)

    def reset_prefix_cache(self) -> None:
        """Let no request that is added from now on find what was cached before.

        Raises:
          ValueError: prefixes are registered, which nobody would find any more.
        """
        require(
            not self._prefixes,
            f"{len(self._prefixes)} prefixes are registered: unregister_prefix must come first",
        )
        self._num_cache_resets += 1

    def set_params(self, params: Any) -> None:
        """Go on with other weights of the same model; nothing cached with the old ones is used.

        Args:
          params: a pytree like ``model.params``, with the same shapes and dtypes.

        Raises:
          ValueError: it is no such pytree, requests are unfinished, or prefixes are registered.
        """
        self._check_alive()
        shapes = [jax.tree.map(_shape_of, tree) for tree in (params, self.model.params)]
        require(
            shapes[0] == shapes[1],
            "params must have the tree, shapes and dtypes of the model's: "
            f"{reprlib.repr(shapes[0])} is not {reprlib.repr(shapes[1])}",
        )
        require(
            not self.has_unfinished,
            f"set_params must wait: {len(self._by_id)} requests live, {len(self._ready)} outputs "
            "are not taken yet; step until has_unfinished is False",
        )
        self.reset_prefix_cache()
        self.model = dataclasses.replace(self.model, params=params)
        self.executor.set_params(params)

    def _step_for(
        self, request_ids: set[str], *, is_own: Callable[[RequestOutput], bool] = lambda _: True
    ) -> list[RequestOutput]:
        """Step until these requests have outputs, or none of them lives; keep the others'.

        ``is_own`` tells the outputs of requests with one id apart.
        """
        while True:
            wanted: list[RequestOutput] = []
            for output in self.step():
                is_wanted = output.request_id in request_ids and is_own(output)
                (wanted if is_wanted else self._ready).append(output)
            if wanted or not request_ids & self._by_id.keys():
                return wanted

    def _discard(
        self, request_ids: set[str], *, is_own: Callable[[RequestOutput], bool] = lambda _: True
    ) -> None:
        """Cancel requests whose outputs nobody will ask for."""
        for request_id in request_ids:
            self.cancel(request_id)
        if not self._by_id and self._dead is None and not self._stepping.locked():
            # Nobody may step any more: the step in flight is nobody's, and so are its blocks.
            self._settle()
        self._ready = [
            output
            for output in self._ready
            if output.request_id not in request_ids or not is_own(output)
        ]


def _shape_of(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
