"""The HTTP API: OpenAI's protocol over one engine, many replicas of it through Ray Serve."""
