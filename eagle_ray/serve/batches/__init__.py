"""OpenAI's files and batches: kept in a directory or bucket, answered by the endpoint's own replicas."""
