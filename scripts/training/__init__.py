"""Training and fine-tuning the families of ``models/``; ``scripts/train.py`` has the flags."""
