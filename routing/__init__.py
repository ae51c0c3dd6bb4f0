"""Decides: view, costs, routes, health, placement. Standard library only; no I/O, no clock, no torch."""
