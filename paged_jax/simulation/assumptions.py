"""Every number of the experiments that the paper does not give: chosen once, before any comparison.

All figures use these, and docs/experiments.md shows what each result becomes with every one of them
at half and at double.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

# Standard deviations of the lengths' logarithms (``lengths.fit_spread``) in the first turns of
# 2,656 ShareGPT conversations: OpenChat's ShareGPT lengths as published with Sarathi-Serve, Llama-2
# tokens, the first half of them. `measure_sharing.py --what=fit --trace=FILE` prints them.
PROMPT_SPREAD = 1.1935
OUTPUT_SPREAD = 0.9876

# What that trace was filtered by, and the paper's requests: OPT-13B has 2,048 positions.
MIN_LEN = 4  # tokens of a prompt, and of an output
MAX_PROMPT = 1024  # tokens
MAX_TOTAL = 2048  # tokens, prompt and output

# Latency at which a request rate still counts as sustained: five tokens a second, a fast reader.
# Of the paper's curves (Figs. 12, 14, 16, 17) only the text's ratios are known.
MAX_NORMALIZED_LATENCY = 0.2  # seconds a token

# Translation (Fig. 16): sentences of news in English, and in German, LLaMA tokens.
TRANSLATION_PROMPT_MEAN = 30.0
TRANSLATION_OUTPUT_MEAN = 42.0
TRANSLATION_SPREAD = 0.5  # sigma of both logarithms

# Chats (Fig. 17): questions and answers have the lengths of ShareGPT, each prompt is the end of the
# whole history. Mean of a geometric distribution, as of the conversations of that trace.
CHAT_MEAN_TURNS = 5.4
CHAT_MAX_PROMPT = 1024  # tokens of history and question that are kept (paper 6.5)
CHAT_MAX_OUTPUT = 1024  # tokens

# Beam search without a model (``beams.BeamModel``): how many next tokens are alike. Fitted to what
# sharing saved on SmolLM2 and MT-bench questions, 41.4, 60.3 and 67.4 % at widths 2, 4 and 6
# (docs/beam_search.md): this gives 41.0, 60.5 and 66.7 %.
BEAM_CONCENTRATION = 1.0

# Scheduler limits of all policies, those of vLLM 0.1.
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2560


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostConstants:
    """What a data sheet does not tell.

    Attributes:
      bandwidth_efficiency: share of the peak memory bandwidth that is reached.
      flops_efficiency: share of the peak operations a second that is reached.
      link_efficiency: share of the peak link bandwidth that is reached.
      reduce_latency: seconds of an all-reduce of nothing.
      overhead: seconds a step, whatever it does.
      row_overhead: seconds a sampled token.
      host_bandwidth: bytes a second between device and host, for swapping.
      swap_latency: seconds a block moved, each way.

    Raises:
      ValueError: a value is negative, or an efficiency or a bandwidth 0.
    """

    bandwidth_efficiency: float = 0.8
    flops_efficiency: float = 0.55
    link_efficiency: float = 0.7
    reduce_latency: float = 15e-6
    overhead: float = 8e-3
    row_overhead: float = 0.3e-3
    host_bandwidth: float = 25e9
    swap_latency: float = 10e-6

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least_is_open = field.name.endswith(("efficiency", "bandwidth"))
            if value < 0 or (least_is_open and value == 0):
                sign = ">" if least_is_open else ">="
                raise ValueError(f"{field.name}={value!r} must be {sign} 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """All of this page in one record, so that a run can be repeated with any of it changed.

    The fields are the constants above, in small letters, and ``cost``.
    """

    prompt_spread: float = PROMPT_SPREAD
    output_spread: float = OUTPUT_SPREAD
    min_len: int = MIN_LEN
    max_prompt: int = MAX_PROMPT
    max_total: int = MAX_TOTAL
    max_normalized_latency: float = MAX_NORMALIZED_LATENCY
    translation_prompt_mean: float = TRANSLATION_PROMPT_MEAN
    translation_output_mean: float = TRANSLATION_OUTPUT_MEAN
    translation_spread: float = TRANSLATION_SPREAD
    chat_mean_turns: float = CHAT_MEAN_TURNS
    chat_max_prompt: int = CHAT_MAX_PROMPT
    chat_max_output: int = CHAT_MAX_OUTPUT
    beam_concentration: float = BEAM_CONCENTRATION
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    cost: CostConstants = CostConstants()

    @property
    def values(self) -> dict[str, float]:
        """Every constant by name; those of ``cost`` are called ``cost.name``."""
        flat = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "cost"
        }
        return flat | {f"cost.{name}": value for name, value in vars(self.cost).items()}

    def scaled(self, name: str, factor: float) -> Assumptions:
        """The same with one constant times ``factor``; whole numbers stay whole.

        Args:
          name: a key of ``values``.
          factor: more than 0.

        Raises:
          ValueError: there is no such constant.
        """
        if name not in self.values:
            raise ValueError(f"name={name!r} must be one of {[*self.values]}")
        value = self.values[name] * factor
        if isinstance(self.values[name], int):
            value = max(round(value), 1)
        if name.startswith("cost."):
            cost = dataclasses.replace(self.cost, **{name.removeprefix("cost."): value})
            return dataclasses.replace(self, cost=cost)
        return dataclasses.replace(self, **{name: value})

    def variants(self) -> Iterator[tuple[str, float, Assumptions]]:
        """Name, factor and assumptions with every constant at half and at double in turn."""
        for name in self.values:
            for factor in (0.5, 2.0):
                yield name, factor, self.scaled(name, factor)


DEFAULT = Assumptions()
