"""The HTTP door: OpenAI's protocol over one engine, many replicas of it through Ray Serve."""
