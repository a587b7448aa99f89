"""Publish a run's finished part files to a Hugging Face dataset, a Delta table or an Iceberg table."""
