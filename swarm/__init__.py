"""Moves bytes: wire, transport, discovery, checkpoints, client sessions, generation, command line."""
