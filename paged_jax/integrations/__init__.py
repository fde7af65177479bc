"""Adapters between this library's layouts and calls and those of others."""
