"""ACTS: owns time, threads, bytes and the process."""
