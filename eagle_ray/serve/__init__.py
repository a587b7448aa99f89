"""The HTTP API: OpenAI's protocol over one engine, or over several replicas of it through Ray Serve."""
