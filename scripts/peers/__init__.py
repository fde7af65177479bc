"""Engines that ``bench_peers`` compares, each with an adapter for an environment of its own."""
