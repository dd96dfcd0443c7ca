from tests.stores.s3 import bucket, s3_environment, s3_proxy, s3_server, s3_session

__all__ = ["bucket", "s3_environment", "s3_proxy", "s3_server", "s3_session"]
