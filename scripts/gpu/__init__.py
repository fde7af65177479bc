"""The parts of `gpu_check`: what runs on a machine with an NVIDIA GPU."""
