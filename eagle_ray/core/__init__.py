"""Data types that drafters, planners and the engine share: Sequence, DecodeBatch, StepTimer."""
