"""The S3 server of the tests of jobs in a bucket."""

from tests.batch.s3.conftest import bucket, outside, s3_server

__all__ = ["bucket", "outside", "s3_server"]
