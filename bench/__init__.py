"""`make bench`: what the swarm costs beside one local process. Measures and never judges; not part of the package."""
