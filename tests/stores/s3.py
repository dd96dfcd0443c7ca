"""Fixtures: an S3 server on loopback, a bucket in it, and a proxy before it that spoils requests.

Elsewhere a conftest.py imports `bucket`, `s3_environment`, `s3_proxy`, `s3_server` and `s3_session` from here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loopline.stores import RemoteStore

from .fault_proxy import FaultProxy

FAKE = {
    "AWS_ACCESS_KEY_ID": "fake",
    "AWS_SECRET_ACCESS_KEY": "fake",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


@dataclass(frozen=True)
class Bucket:
    """A bucket, and how to get a store in it: straight, or through the proxy."""

    name: str
    server: str
    proxy: str
    session: Any  # one for all: it reads the description of S3 from its files once

    def store(self, folder: str = "runs/1", **options: Any) -> RemoteStore:
        return RemoteStore(f"s3://{self.name}/{folder}", endpoint_url=self.server, session=self.session, **options)

    def spoiled_store(self, folder: str = "runs/1", *, timeout_s: float = 30.0, **options: Any) -> RemoteStore:
        """`timeout_s` is for faults that hang; it must be longer than a slow machine takes where none does."""
        options = {"deadline_s": 60.0, "first_wait_s": 0.002, **options}
        timeouts = {"connect_timeout": 30.0, "read_timeout": timeout_s}
        options = {"endpoint_url": self.proxy, "session": self.session, "config_kwargs": timeouts, **options}
        return RemoteStore(f"s3://{self.name}/{folder}", **options)


@pytest.fixture(scope="session")
def s3_server():
    """The URL of the server; it ends with the session, also where that is killed."""
    script = Path(__file__).with_name("s3_server.py")
    # few keys on a page, so that every listing has several
    environment = {**os.environ, **FAKE, "MOTO_S3_DEFAULT_MAX_KEYS": "3"}
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()
        process.wait(30)


@pytest.fixture(scope="session")
def s3_proxy(s3_server):
    proxy = FaultProxy(s3_server)
    yield proxy
    proxy.stop()


@pytest.fixture(scope="module")
def s3_environment():
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                patch.delenv(name)
        for name, value in FAKE.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def s3_session(s3_environment):
    from aiobotocore.session import AioSession

    return AioSession()


@pytest.fixture
def bucket(s3_server, s3_proxy, s3_session):
    s3_proxy.heal()
    yield make_bucket(s3_server, s3_proxy, s3_session)
    s3_proxy.heal()


def make_bucket(server: str, proxy: FaultProxy, session: Any) -> Bucket:
    name = f"bucket-{uuid.uuid4().hex}"
    urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="PUT"), timeout=30).close()
    return Bucket(name, server, proxy.url, session)
