"""The event log: lines in order, rotated, read back; and what happens when writing fails."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.events import BlockEvent
from paged_jax.blocks.replay import BlockReplay
from paged_jax.events import EventLog, block_events, read_events


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "events.jsonl"


def texts(path: pathlib.Path) -> list[tuple[int, Any]]:
    return [(line["step"], line["number"]) for line in read_events(path) if "number" in line]


def write_numbers(log: EventLog, numbers: range) -> None:
    for number in numbers:
        log.step = number // 10
        log.write("test", {"number": number})


def test_what_a_line_looks_like(path: pathlib.Path):
    with EventLog(path, about={"num_blocks": 8}) as log:
        log.step = 3
        log.take(BlockEvent("share", "fork", 1, [1, 2], (), 7, parent_id=0))
        log.take(BlockEvent("copy", "write", 0, (2,), (3,)))
        log.take(BlockEvent("fill", "append", 0, (), (), 8))
        log.take(BlockEvent("fill", "append", 1, (), (), 8))
        log.take(BlockEvent("allocate", "append", 1, [4], (), 9))
        log.take(BlockEvent("fill", "append", 0, (), (), 9))
        log.take(BlockEvent("release", "unpin", blocks=[1], pin_id=2))
        log.write("step", {"running": 1})
    lines = [json.loads(line) for line in path.read_text("ascii").splitlines()]
    times = [line.pop("t") for line in lines[1:]]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 60
    header = lines.pop(0)
    assert header["event"] == "file"
    assert (header["version"], header["file"], header["num_blocks"]) == (1, 0, 8)
    assert [line.pop("step") for line in lines] == [3] * 7
    assert lines == [
        {"event": "share", "reason": "fork", "seq": 1, "parent": 0, "blocks": [1, 2], "tokens": 7},
        {"event": "copy", "reason": "write", "seq": 0, "blocks": [2], "to": [3]},
        {"event": "fill", "reason": "append", "seqs": [0, 1], "tokens": [8, 8]},
        {"event": "allocate", "reason": "append", "seq": 1, "blocks": [4], "tokens": 9},
        {"event": "fill", "reason": "append", "seqs": [0], "tokens": [9]},
        {"event": "release", "reason": "unpin", "pin": 2, "blocks": [1]},
        {"event": "step", "running": 1},
    ]


def test_events_come_back_as_they_were_told(path: pathlib.Path):
    told: list[BlockEvent] = []
    with EventLog(path) as log:

        def observe(event: BlockEvent) -> None:
            told.append(event._replace(blocks=list(event.blocks), to=list(event.to)))
            log.take(event)

        manager = BlockManager(num_blocks=8, block_size=4, num_host_blocks=8, observer=observe)
        manager.allocate(0, num_tokens=6)
        manager.fork(0, 1)
        manager.begin_step()
        manager.append(0)
        manager.append(1)
        manager.begin_step()
        manager.swap_out([0, 1])
        manager.begin_step()
        manager.swap_in([0, 1])
        manager.free(1)
    read = [event for line in read_events(path) for event in block_events(line)]
    assert [event._replace(blocks=list(event.blocks), to=list(event.to)) for event in read] == told
    replay = BlockReplay()
    for event in read:
        replay.take(event)
    assert replay.tables == {0: manager.table_array(0).tolist()}


@pytest.mark.parametrize("max_files", [0, 1, 3, 100])
def test_files_are_rotated_by_size_and_old_ones_deleted(path: pathlib.Path, max_files: int):
    with EventLog(path, max_bytes=1000, max_files=max_files, about={"k": 1}) as log:
        write_numbers(log, range(200))
    files = sorted(path.parent.iterdir())
    assert len(files) == min(max_files, len(files) - 1) + 1
    assert (len(files) > 10) == (max_files == 100)
    assert all(file.stat().st_size <= 1000 for file in files)
    assert all(json.loads(file.read_text().splitlines()[0])["k"] == 1 for file in files)
    kept = [number for _, number in texts(path)]
    assert kept == list(range(200))[200 - len(kept) :]
    assert (len(kept) == 200) == (max_files == 100)


def test_missing_first_files_are_said(path: pathlib.Path, caplog: pytest.LogCaptureFixture):
    with EventLog(path, max_bytes=1000, max_files=2) as log:
        write_numbers(log, range(200))
    texts(path)
    assert "files of the record are gone" in caplog.text


def test_a_line_longer_than_a_file_is_whole(path: pathlib.Path):
    with EventLog(path, max_bytes=300, max_files=9) as log:
        log.write("test", {"number": "x" * 1000})
        log.write("test", {"number": 1})
        log.write("test", {"number": "y" * 1000})
    assert [number for _, number in texts(path)] == ["x" * 1000, 1, "y" * 1000]
    assert len(list(path.parent.iterdir())) == 3


def test_lines_are_kept_back_until_flushed(path: pathlib.Path):
    log = EventLog(path)
    log.write("test", {"number": 1})
    log.take(BlockEvent("fill", "append", 0, (), (), 8))
    assert len(path.read_text().splitlines()) == 1
    log.flush()
    assert len(path.read_text().splitlines()) == 3
    log.flush()
    assert len(path.read_text().splitlines()) == 3
    write_numbers(log, range(2000))
    assert 2000 > len(path.read_text().splitlines()) > 500, "64 KiB are not kept back"


def test_lines_are_written_within_a_second_of_whatever_clock(path: pathlib.Path):
    now = 5.0
    log = EventLog(path, clock=lambda: now)
    log.write("test", {"number": 1})
    assert texts(path) == []
    now = 7.0
    log.write("test", {"number": 2})
    assert [number for _, number in texts(path)] == [1, 2]


def test_an_earlier_record_is_kept_and_not_mixed_in(path: pathlib.Path):
    for run in range(3):
        with EventLog(path, max_bytes=500, max_files=9) as log:
            write_numbers(log, range(10 * run, 10 * run + 10))
    assert [number for _, number in texts(path)] == list(range(20, 30))
    files = list(path.parent.iterdir())
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert sorted(line["number"] for line in lines if "number" in line) == list(range(30))


def test_the_half_written_last_line_is_left_out(
    path: pathlib.Path, caplog: pytest.LogCaptureFixture
):
    with EventLog(path) as log:
        write_numbers(log, range(5))
    path.write_bytes(path.read_bytes()[:-7])
    assert [number for _, number in texts(path)] == [0, 1, 2, 3]
    assert "line 6 is incomplete" in caplog.text


def test_a_broken_line_in_the_middle_is_refused(path: pathlib.Path):
    with EventLog(path) as log:
        write_numbers(log, range(5))
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:-3]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="line 3 must be JSON"):
        texts(path)


def test_a_bad_path_is_refused_when_the_log_is_made(tmp_path: pathlib.Path):
    other = tmp_path / "weights"
    other.write_bytes(b"\x00\x93 not a record")
    for bad, message in (
        (tmp_path / "no" / "folder" / "events", "No such file"),
        (tmp_path, "must be an event record"),
        (other, "must be an event record"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            EventLog(bad)
        assert f"path={str(bad)!r}" in str(caught.value)
    assert other.read_bytes() == b"\x00\x93 not a record"
    assert [file.name for file in tmp_path.iterdir()] == ["weights"]


@pytest.mark.parametrize(("name", "value"), [("max_bytes", 0), ("max_files", -1)])
def test_limits_are_checked(path: pathlib.Path, name: str, value: int):
    with pytest.raises(ValueError, match=f"{name}={value} must be >= {value + 1}"):
        EventLog(path, **dict[str, Any]({name: value}))


def test_what_is_not_a_record_is_not_read(tmp_path: pathlib.Path):
    file = tmp_path / "x"
    with pytest.raises(ValueError, match="must be an event record"):
        list(read_events(file))
    for text in ("", "[]\n", '{"event": "step"}\n'):
        file.write_text(text)
        with pytest.raises(ValueError, match="must be an event record"):
            list(read_events(file))
    file.write_text('{"event": "file", "version": 2}\n')
    with pytest.raises(ValueError, match="must be an event record of version 1"):
        list(read_events(file))


def test_a_line_without_a_field_is_refused():
    with pytest.raises(ValueError, match="must have 'reason'"):
        block_events({"event": "free", "blocks": []})


@pytest.mark.parametrize("where", ["write", "rotate"])
def test_a_full_disk_ends_the_record_and_nothing_else(
    path: pathlib.Path,
    where: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    log = EventLog(path, max_bytes=400, max_files=9)
    write_numbers(log, range(3))
    log.flush()
    if where == "write":
        monkeypatch.setattr("builtins.open", raiser(OSError(28, "No space left on device")))
    else:
        monkeypatch.setattr("os.replace", raiser(OSError(28, "No space left on device")))
    write_numbers(log, range(3, 100))
    log.take(BlockEvent("fill", "append", 0, (), (), 8))
    log.flush()
    monkeypatch.undo()
    write_numbers(log, range(100, 200))
    log.close()
    assert log.is_stopped
    kept = [number for _, number in texts(path)]
    assert kept == list(range(len(kept)))
    assert 3 <= len(kept) < 20
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "ends here" in warnings[0]
    assert "No space left" in warnings[0]


def raiser(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_closed_log_takes_nothing_more(path: pathlib.Path):
    log = EventLog(path)
    write_numbers(log, range(2))
    log.close()
    write_numbers(log, range(2, 4))
    log.close()
    assert [number for _, number in texts(path)] == [0, 1]
