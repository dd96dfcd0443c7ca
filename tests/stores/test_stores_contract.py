import itertools

import pytest

from loopline.stores import LocalStore, MemoryStore, RemoteStore
from loopline.testing import StoreContract

numbers = itertools.count()


class TestMemoryStore(StoreContract):
    def make_store(self):
        return MemoryStore()


class TestLocalStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def make_store(self):
        return LocalStore(self.folder / f"runs/{next(numbers)}")


class TestFolderThroughFsspec(TestLocalStore):
    def make_store(self):
        return RemoteStore(f"file://{self.folder}/runs/{next(numbers)}")


class TestMemoryThroughFsspec(StoreContract):
    def make_store(self):
        return RemoteStore(f"memory://contract-{next(numbers)}")


class TestS3(StoreContract):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket):
        self.bucket = bucket

    def make_store(self):
        return self.bucket.store(f"runs/{next(numbers)}")
