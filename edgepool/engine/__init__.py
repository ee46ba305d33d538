"""Engines: what stands in a model's way to one, what it will cost, and what the machine has."""
