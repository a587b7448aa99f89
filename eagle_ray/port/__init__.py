"""Engine clients behind one protocol: callers send requests without knowing which engine answers."""
