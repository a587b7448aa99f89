"""Copies of a run's finished part files in a dataset of the Hugging Face hub, a Delta table or an Iceberg table."""
