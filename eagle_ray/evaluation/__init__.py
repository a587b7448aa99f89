"""Paired comparisons of draft methods: outputs, acceptance and speed."""
