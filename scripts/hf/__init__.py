"""Tools that run beside Hugging Face transformers, in an environment of its own."""
