import json

import pytest

PROMPTS = ("--prompt=hello", "--prompt=the 12")
SMALL = ("--num_blocks=33", "--max_tokens=6", "--ignore_eos")


def test_text_and_figures(run_program):
    result = run_program("generate", *PROMPTS, *SMALL)
    assert result.returncode == 0, result.stderr
    assert "hello" in result.stdout
    assert "6 tokens (length)" in result.stdout
    for row in ("requests", "tokens/s", "blocks used", "of it real tokens", "dense, "):
        assert row in result.stderr
    assert "0 now" in result.stderr


def test_json_lines_from_standard_input(run_program):
    stdin = 'hello\n\n"the\\n12"\n'
    result = run_program(
        "generate", "--prompt_file=-", "--json", "--logprobs=2", "--nofigures", *SMALL, stdin=stdin
    )
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted(record["index"] for record in records) == [0, 1]
    for record in records:
        assert len(record["token_ids"]) == 6
        assert record["finish_reason"] == "length"
        assert [len(entry["top"]) for entry in record["logprobs"]] == [2] * 6


def test_a_seed_repeats_whatever_else_runs(run_program):
    flags = ("--json", "--nofigures", "--temperature=1", "--seed=3", *SMALL)
    alone = run_program("generate", "--prompt=hello", *flags)
    both = run_program("generate", *PROMPTS, *flags)
    records = [json.loads(line) for line in both.stdout.splitlines()]
    first = next(record for record in records if record["index"] == 0)
    assert first["token_ids"] == json.loads(alone.stdout)["token_ids"]


def test_speculation_changes_no_token(run_program):
    flags = ("--prompt=the 12 the 12 the", "--json", "--num_blocks=33", "--max_tokens=24")
    plain = run_program("generate", *flags)
    drafted = run_program("generate", *flags, "--speculate=3")
    assert "accepted" not in plain.stderr
    assert "accepted" in drafted.stderr
    tokens = [json.loads(result.stdout)["token_ids"] for result in (plain, drafted)]
    assert tokens[0] == tokens[1]


def test_several_answers_and_shared_prefixes(run_program):
    """One sequence at a time, so that the second request finds what the first one computed."""
    flags = ("--prompt=the 12 the 12 the 12", "--prompt=the 12 the 12 the 12", *SMALL)
    sampled = ("--temperature=1", "--seed=1", "--n=2", "--max_num_seqs=2", "--block_size=2")
    cached = {}
    for more in ((), ("--noprefix_cache",), ("--cache_salt=a",)):
        result = run_program("generate", *flags, *sampled, "--json", *more)
        assert result.returncode == 0, result.stderr
        records = [json.loads(line) for line in result.stdout.splitlines()]
        assert all([one["index"] for one in record["outputs"]] == [0, 1] for record in records)
        assert records[0]["token_ids"] == records[0]["outputs"][0]["token_ids"]
        cached[more] = [record["num_cached_tokens"] for record in records]
        assert f"prompt ({sum(cached[more])} of them cached), 24 generated" in result.stderr
    assert cached[("--noprefix_cache",)] == [0, 0]
    assert cached[()] == cached[("--cache_salt=a",)]
    assert cached[()][0] == 0 < cached[()][1]
    shown = run_program("generate", *flags[:1], *SMALL, *sampled)
    assert "12 tokens (length)" in shown.stdout
    assert "1: " in shown.stdout


def test_chat_template(run_program):
    plain, chat = (
        run_program("generate", "--prompt=hello", "--json", "--nofigures", *SMALL, *flags)
        for flags in ((), ("--chat", "--system=be brief"))
    )
    lengths = [json.loads(result.stdout)["num_prompt_tokens"] for result in (plain, chat)]
    assert lengths[1] > lengths[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "no prompt"),
        (("--prompt_file=/nowhere/prompts.txt",), "/nowhere/prompts.txt"),
        (("--prompt=hello", "--system=brief"), "--system needs --chat"),
        (("--prompt=hello", "--cache_dir=/dev/null"), "/dev/null"),
        (("--prompt=hello", "hello"), "unexpected arguments"),
        (("--prompt=hello", "--top_p=2"), "top_p=2.0 must be"),
        (("--prompt=hello", "--num_blocks=1"), "num_blocks=1 must be"),
        (("--prompt=hello", "--num_blocks=2", "--block_size=1"), "must leave room"),
        (("--prompt=hello", "--model=no-such"), "no-such"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_is_named(run_program, flags, message):
    result = run_program("generate", *flags)
    assert result.returncode != 0
    shown = " ".join((result.stdout + result.stderr).split())
    assert message in shown
    assert "Traceback" not in shown


def test_a_line_that_is_no_json_string(run_program):
    result = run_program("generate", "--prompt_file=-", stdin='ok\n"broken\n')
    assert "line 2: not a JSON string" in result.stdout + result.stderr


def test_lines_end_at_newlines_only_and_a_byte_order_mark_is_no_text(run_program):
    stdin = '\ufeff"one"\r\na\x0cb\u2028c\n'
    result = run_program(
        "generate", "--prompt_file=-", "--json", *SMALL, "--nofigures", stdin=stdin
    )
    assert len(result.stdout.splitlines()) == 2, result.stderr


def test_nostream_still_shows_the_text(run_program):
    result = run_program("generate", "--prompt=hello", "--nostream", "--nofigures", *SMALL)
    assert "6 tokens (length)" in result.stdout


def test_beam_search(run_program):
    result = run_program("generate", *PROMPTS, *SMALL, "--json", "--nofigures", "--beam_width=3")
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [len(record["token_ids"]) for record in records] == [6, 6]
