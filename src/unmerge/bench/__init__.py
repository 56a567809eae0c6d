"""Benchmarks: tasks (data, model, request) and the commands that print their tables."""
