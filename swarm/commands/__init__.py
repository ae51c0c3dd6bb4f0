"""What each command of `swarm` does once its options are read. `swarm/cli.py` imports them late, as torch is slow."""
