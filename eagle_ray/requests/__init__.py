"""Requests: their parameters, their forms in every API, and the answers to them."""
