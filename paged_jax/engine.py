"""The engine and the ways to use it: all at once, as a stream, or step by step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from paged_jax.config import require
from paged_jax.engine_core import EngineCore
from paged_jax.output_stream import OutputStream
from paged_jax.outputs import RequestOutput
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
        self, prompts: Prompt | SequenceOf[Prompt], params: Params = None
    ) -> list[str]:
        """Queue several prompts, or none of them if one is refused.

        Args:
          prompts: texts or lists of token ids; one alone is a list of one.
          params: one for all, or one each.

        Raises:
          ValueError: see ``add_request``, or the numbers of prompts and parameters differ.
        """
        prompt_list = as_prompt_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params_list = [params or SamplingParams()] * len(prompt_list)
        else:
            require(
                isinstance(params, Iterable),
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
                    request_ids.append(self.add_request(prompt, one))
                except ValueError as error:
                    raise ValueError(f"prompts[{index}]: {error}") from error
        except BaseException:
            self._discard(set(request_ids))
            raise
        return request_ids

    def generate(
        self, prompts: Prompt | SequenceOf[Prompt], params: Params = None
    ) -> list[RequestOutput]:
        """Run prompts to their end; arguments and errors as for ``add_requests``.

        Returns:
          The last output of each, in the order of the prompts.
        """
        request_ids = self.add_requests(prompts, params)
        final = {out.request_id: out for out in self.run(request_ids) if out.finished}
        return [final[request_id] for request_id in request_ids]

    def stream(self, prompts: Prompt | SequenceOf[Prompt], params: Params = None) -> OutputStream:
        """Queue prompts and return an iterator over their outputs, as they come.

        Arguments and errors as for ``add_requests``; to know which output is whose, call that and
        ``run``.
        """
        return self.run(self.add_requests(prompts, params))

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

        def discard(request_ids: set[str]) -> None:
            # An id may belong to another request by now: that one is not the stream's.
            self._discard({name for name in request_ids if self._by_id.get(name) is named[name]})

        return OutputStream(named, step=self._step_for, discard=discard)

    def _step_for(self, request_ids: set[str]) -> list[RequestOutput]:
        """Step until these requests have outputs, or none of them lives; keep the others'."""
        while True:
            outputs = self.step()
            self._ready = [out for out in outputs if out.request_id not in request_ids]
            wanted = [out for out in outputs if out.request_id in request_ids]
            if wanted or not request_ids & self._by_id.keys():
                return wanted

    def _discard(self, request_ids: set[str]) -> None:
        """Cancel requests whose outputs nobody will ask for."""
        for request_id in request_ids:
            self.cancel(request_id)
        self._ready = [output for output in self._ready if output.request_id not in request_ids]
