"""The engine: scheduler, prefill, verify step, CUDA graphs, calibration of costs, and a plain reference decoder."""
