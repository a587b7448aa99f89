"""OpenAI's Responses API over chat completions, without stored state: a request has its whole conversation."""
