"""Streams: nothing is left behind, nothing is lost, nothing hangs."""

import gc

import pytest
from suites.engine_runs import (
    assert_idle,
    check_greedy,
    check_outputs,
    drive,
    greedy,
    make_engine,
    random_prompts,
)

from paged_jax import Engine, RequestOutput
from paged_jax.output_stream import OutputStream

PROMPTS = random_prompts(1, [30, 4, 9])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(engine):
    yield
    assert_idle(engine)


def test_deltas_of_a_stream_add_up(engine):
    outputs = list(engine.stream(PROMPTS, greedy(11)))
    ids = list(dict.fromkeys(output.request_id for output in outputs))
    assert len(ids) == 3
    assert len(outputs) > 20  # token by token
    for request_id in ids:
        check_outputs([output for output in outputs if output.request_id == request_id])
    check_greedy([output for output in outputs if output.finished], [greedy(11)] * 3)


@pytest.mark.parametrize("num_taken", [0, 1, 5])
@pytest.mark.parametrize("way", ["close", "with", "drop", "error"])
def test_leaving_a_stream_early_frees_all_blocks(engine, num_taken, way):
    def take(stream: OutputStream) -> None:
        for _ in range(num_taken):
            next(stream)

    stream = engine.stream(PROMPTS, greedy(11))
    if way == "with":
        with stream:
            take(stream)
    elif way == "error":
        take(stream)
        with pytest.raises(KeyError), stream:
            raise KeyError
    else:
        take(stream)
    if way == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    del stream
    gc.collect()
    assert engine.num_used_blocks == 0
    # The step in flight is dropped with the next step, and yields nothing.
    assert drive(engine) == {}
    check_greedy(engine.generate(PROMPTS, greedy(3)), [greedy(3)] * 3)


def test_two_interleaved_streams_both_complete(engine):
    streams = [engine.stream(PROMPTS[:2], greedy(9)), engine.stream(PROMPTS[2:], greedy(14))]
    finals: list[list[RequestOutput]] = [[], []]
    while any(streams):
        for index, stream in enumerate(streams):
            output = next(stream, None) if stream is not None else None
            if output is None:
                streams[index] = None
            elif output.finished:
                finals[index].append(output)
    check_greedy(sorted(finals[0], key=lambda o: o.request_id), [greedy(9)] * 2)
    check_greedy(finals[1], [greedy(14)])


def test_outputs_kept_while_another_stream_ran_come_with_run(engine):
    first = engine.add_requests(PROMPTS[:1], greedy(2))
    second = engine.add_requests(PROMPTS[1:2], greedy(12))
    assert [o.request_id for o in engine.run(second) if o.finished] == second
    # The first one has ended meanwhile; its outputs wait for whoever asks for them.
    kept = list(engine.run(first))
    check_outputs(kept)
    check_greedy(kept[-1:], [greedy(2)])
    with pytest.raises(ValueError, match="not in the engine"):
        engine.run(first)


def test_a_stream_whose_outputs_someone_else_took_ends(engine):
    stream = engine.stream(PROMPTS, greedy(4))
    assert len(drive(engine)) == 3
    assert list(stream) == []
    (request_id,) = engine.add_requests(PROMPTS[:1], greedy(4))
    stream = engine.run([request_id])
    engine.cancel(request_id)
    assert list(drive(engine)) == [request_id]
    assert list(stream) == []


def test_cancelling_while_streaming_ends_the_stream(engine):
    ids = engine.add_requests(PROMPTS[:1], greedy(20))
    outputs = []
    for output in engine.run(ids):
        outputs.append(output)
        if len(output.token_ids) == 5:
            engine.cancel(ids[0])
    check_outputs(outputs)
    assert outputs[-1].finish_reason == "cancelled"
    assert len(outputs[-1].token_ids) == 5


def test_an_error_in_a_step_reaches_whoever_iterates():
    discarded: list[set[str]] = []

    def step(request_ids: set[str]) -> list:
        raise FloatingPointError(f"NaN for {sorted(request_ids)}")

    stream = OutputStream(["a", "b"], step=step, discard=discarded.append)
    with pytest.raises(FloatingPointError, match=r"NaN for \['a', 'b'\]"):
        next(stream)
    stream.close()
    assert discarded == [{"a", "b"}]
