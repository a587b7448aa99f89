"""What a request may say, the request itself, and the answers to it."""
