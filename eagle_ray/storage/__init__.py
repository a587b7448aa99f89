"""Paths on local disks and S3, with atomic and conditional writes."""
