"""Drafts without a model: tokens that followed the same ones before."""
