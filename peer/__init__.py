"""Computes: the serving peer. Blocks, cache, scheduler, executor, session seats, service, node."""
