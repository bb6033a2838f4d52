"""Copies between GPUs and host memory: the driver's streams, two copy engines, the choice between them."""
