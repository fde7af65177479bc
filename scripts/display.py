"""Several streams of text at once: a live panel on a terminal, whole texts anywhere else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from paged_jax import RequestOutput

STATUS_SECONDS = 2.0


class StreamDisplay:
    """Shows outputs as they come; use as a context manager.

    On a terminal every running request has a panel that grows. Elsewhere each text is printed when
    it ends, and a status line on standard error says that work goes on.

    Args:
      console: where texts go.
      prompts: what each request was asked, by number.
      enabled: False shows nothing.
      is_live: show growing texts on a terminal; False shows each when it ends.
      separator: between a prompt and its text; "" where the text continues the prompt.
      max_panels: most running requests on the screen at once.
    """

    def __init__(
        self,
        console: Console,
        prompts: Sequence[str],
        *,
        enabled: bool,
        is_live: bool = True,
        separator: str = "",
        max_panels: int = 8,
    ) -> None:
        self._console = console
        self._prompts = prompts
        self._enabled = enabled
        self._separator = separator
        self._max_panels = max_panels
        self._running: dict[int, RequestOutput] = {}
        self._num_tokens = 0
        self._num_done = 0
        self._begin = self._last_status = time.monotonic()
        self._live = Live(console=console, transient=True, refresh_per_second=12)
        self._is_terminal = enabled and is_live and console.is_terminal

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._live.start()
            self._live.update(Text("reading the prompts (compiling, the first time) ..."))
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._live.stop()

    def update(self, number: int, output: RequestOutput) -> None:
        """Take a request's new output."""
        self._num_tokens += sum(len(one.delta_token_ids) for one in output.outputs)
        if output.finished:
            self._num_done += 1
            self._running.pop(number, None)
            if self._enabled:
                self._console.print(self._panel(number, output))
        else:
            self._running[number] = output
        if self._is_terminal:
            shown = sorted(self._running.items())[: self._max_panels]
            panels = [self._panel(number, output) for number, output in shown]
            self._live.update(Group(*panels, Text(self._status(), style="dim")))
        elif self._enabled and time.monotonic() - self._last_status > STATUS_SECONDS:
            self._last_status = time.monotonic()
            Console(stderr=True).print(self._status(), style="dim", highlight=False)

    def _status(self) -> str:
        rate = self._num_tokens / max(time.monotonic() - self._begin, 1e-9)
        return (
            f"{len(self._running)} running, {self._num_done} of {len(self._prompts)} done, "
            f"{self._num_tokens} tokens, {rate:.0f} tokens/s"
        )

    def _panel(self, number: int, output: RequestOutput) -> Panel:
        prompt = self._prompts[number]
        shortened = prompt if len(prompt) <= 300 else prompt[:300] + " ..."
        body = Text()
        body.append(shortened + self._separator, style="dim")
        for completion in output.outputs:
            if len(output.outputs) > 1:
                body.append(f"\n{completion.index}: ", style="dim")
            body.append(completion.text, style="bold")
        reasons = dict.fromkeys(one.finish_reason or "" for one in output.outputs)
        ending = f" ({', '.join(reasons)})" if output.finished else ""
        title = f"{number}: {sum(len(one.token_ids) for one in output.outputs)} tokens{ending}"
        return Panel(body, title=title, title_align="left")
