"""A demo: one small language model, trained in high precision and with FP8 recipes, compiled, side by side."""
