"""Compiles the GPU kernels for GPUs that are not there, and counts what came out."""
