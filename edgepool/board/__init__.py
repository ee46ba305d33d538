"""The way from a bundle to a session on a board, step by step; `jetson/entrypoint` takes it."""
