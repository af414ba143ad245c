"""Tensor parallelism: one model over several devices of this machine, driven by one process."""
