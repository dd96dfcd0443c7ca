from tests.stores.s3 import bucket, s3_environment, s3_proxy, s3_server, s3_session

__all__ = ["bucket", "s3_environment", "s3_proxy", "s3_server", "s3_session"]

# programs that tests start in processes of their own; to look into one for doctests would run it here
collect_ignore = ["contender.py", "signalled.py", "two_trainings.py"]
