"""Sampling: what a request asks for (host) and how the step draws it (device)."""
