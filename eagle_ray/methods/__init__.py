"""Draft methods: a folder for each, and one record for all of them."""
