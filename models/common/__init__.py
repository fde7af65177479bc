"""What the families share: layers, rotary positions, and the tables of their weights."""
