"""Ray read tasks, and the scan of the driver: files, formats, shards and rows."""
