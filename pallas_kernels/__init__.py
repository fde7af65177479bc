"""Kernels over a KV pool: arrays in, arrays out. They know blocks, never requests."""
