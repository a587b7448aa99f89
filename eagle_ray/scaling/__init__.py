"""Decide how many workers a run needs to meet its deadline: output lengths, remaining work,
policies. No clock, no I/O."""
