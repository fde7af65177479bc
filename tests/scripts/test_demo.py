def test_the_demo_ends_with_pool_and_table(run_program):
    result = run_program("demo", "--max_tokens=8", "--num_blocks=200", "--block_size=4")
    assert result.returncode == 0, result.stderr
    assert "The pool when it was fullest" in result.stdout
    for row in ("requests", "tokens/s", "blocks used", "of it real tokens", "dense, "):
        assert row in result.stdout
    assert result.stdout.count("tokens (") == 8
