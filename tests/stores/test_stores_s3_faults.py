"""Every request between a store and its S3 server is spoiled in turn, in every way."""

import io
import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tests.stores.fault_proxy import FAULTS, internal_error, lose_reply
from tests.stores.s3 import make_bucket

from loopline.core.errors import NoSuchKey, StoreError
from loopline.stores import RemoteStore
from loopline.stores._s3 import S3Place

FULL = os.environ.get("LOOPLINE_FULL") == "1"
SHARE = 1 if FULL else 8

HANGING = ("hang", "hang_after")
SMALL, OLD = b"small", b"old"
LARGE = random.Random(1).randbytes(17_000_003)


@dataclass
class Operation:
    """What is done to the key `x`, what is there before, what it says, and what is there then."""

    name: str
    do: Callable[[object], object]
    before: bytes | None
    says: object
    after: bytes | None
    requests: int


def opened(store):
    try:
        with store.open("x") as file:
            return file.read()
    except NoSuchKey:
        return None


OPERATIONS = [
    Operation("put small", lambda store: store.put("x", io.BytesIO(SMALL)), OLD, None, SMALL, 1),
    Operation("put large", lambda store: store.put("x", io.BytesIO(LARGE)), OLD, None, LARGE, 5),
    Operation("put_new", lambda store: store.put_new("x", SMALL), None, True, SMALL, 4),
    Operation("put_new on another's", lambda store: store.put_new("x", SMALL), OLD, False, OLD, 5),
    Operation("put_new on equal bytes", lambda store: store.put_new("x", OLD), OLD, False, OLD, 5),
    Operation("open small", opened, SMALL, SMALL, SMALL, 2),
    Operation("open large", opened, LARGE, LARGE, LARGE, 4),
    Operation("open what is missing", opened, None, None, None, 2),
    Operation("keys", lambda store: list(store.keys("")), OLD, ["a", "b", "c", "d", "x"], OLD, 2),
    Operation("delete", lambda store: store.delete("x"), OLD, None, None, 1),
    Operation("sweep", lambda store: store.sweep(), OLD, 0, OLD, 1),
]
REQUESTS = [(operation, nth) for operation in OPERATIONS for nth in range(1, operation.requests + 1)]


class Lane:
    """A store behind the proxy, and one that is not."""

    def __init__(self, bucket, proxy):
        self.bucket, self.proxy = bucket, proxy
        self.straight = bucket.store("runs")
        self.spoiled = bucket.spoiled_store("runs")
        self.hurried = bucket.spoiled_store("runs", timeout_s=0.4, attempt_s=1.0)
        for key in "abcd":
            self.straight.put(key, io.BytesIO(b""))

    def outcome(self, operation, fault=None, *, nth=1, forever=False, store=None):
        """What an operation says, or the type of its error, and what is there then."""
        store = store or (self.hurried if fault in map(FAULTS.get, HANGING) else self.spoiled)
        self.straight.sweep()
        if operation.before is None:
            self.straight.delete("x")
        else:
            self.straight.put("x", io.BytesIO(operation.before))
        store._place._honours_conditions = None  # as if it were new: it asks the server again
        self.proxy.heal()
        if fault:
            self.proxy.spoil(fault, nth=nth, forever=forever)
        try:
            says = operation.do(store)
        except StoreError as error:
            says = type(error)
        self.seen = list(self.proxy.seen)
        self.spoilt = self.proxy.spoiled
        self.proxy.heal()
        return says, opened(self.straight)


@pytest.fixture(scope="module")
def lane(s3_server, s3_proxy, s3_session):
    return Lane(make_bucket(s3_server, s3_proxy, s3_session), s3_proxy)


def broken_by_one_fault(lane, fault, share=1, start=0):
    """The requests that, spoiled once, make an operation fail or leave something else than it should."""
    broken = {}
    for operation, nth in REQUESTS[start % share :: share]:
        outcome = lane.outcome(operation, fault, nth=nth)
        assert lane.spoilt == 1
        if outcome != (operation.says, operation.after):
            broken[operation.name, nth] = outcome
    return broken


def test_each_operation_takes_so_many_requests(lane):
    counts = {}
    for operation in OPERATIONS:
        assert lane.outcome(operation) == (operation.says, operation.after)
        counts[operation.name] = len(lane.seen)
    assert counts == {operation.name: operation.requests for operation in OPERATIONS}


def fits(operation, outcome, *, forever):
    """Whether an operation has succeeded, or, where every request is spoiled, has failed and left nothing half-done."""
    says, there = outcome
    if (says, there) == (operation.says, operation.after):
        return True
    return forever and says is StoreError and there in (operation.before, operation.after)


def misfits(lane, fault, *, forever, store=None):
    """The requests after whose spoiling, in this share of them, an operation does not fit."""
    found = {}
    for operation, nth in REQUESTS[list(FAULTS).index(fault) % SHARE :: SHARE]:
        outcome = lane.outcome(operation, FAULTS[fault], nth=nth, forever=forever, store=store)
        assert lane.spoilt or fault in HANGING  # there the machine itself may be too slow for an earlier request
        if not fits(operation, outcome, forever=forever):
            found[operation.name, nth] = outcome
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_one_spoiled_request_changes_nothing(lane, fault):
    assert misfits(lane, fault, forever=False) == {}


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "deliver_twice"])
def test_when_every_request_from_one_on_is_spoiled_the_old_or_the_new_is_there_whole(lane, fault):
    timeouts = {"timeout_s": 0.4, "attempt_s": 1.0} if fault in HANGING else {}
    impatient = lane.bucket.spoiled_store("runs", deadline_s=0.05, **timeouts)
    assert misfits(lane, fault, forever=True, store=impatient) == {}


class Guessing(S3Place):
    """Takes every refusal of a conditional write for another's object."""

    def _mark_of(self, name):
        return True, None


class Hasty(S3Place):
    """Tries once."""

    def _call(self, method, **what):
        return self._once(method, **what)


class Growing(S3Place):
    """Stores the beginning first, so that it is seen early."""

    def put(self, key, pieces):
        pieces = list(pieces)
        self._call("put_object", Key=self._above + key, body=bytes(pieces[0]))
        super().put(key, pieces)


class Trusting(S3Place):
    """Says that it was stored when the answer is lost."""

    def put_new(self, key, data):
        try:
            return super().put_new(key, data)
        except OSError:
            return True


@pytest.mark.parametrize(
    ("variant", "fault", "operation", "nth", "forever"),
    [
        (Guessing, lose_reply, "put_new", 4, False),
        (Hasty, internal_error, "put small", 1, False),
        (Growing, internal_error, "put large", 2, True),
        (Trusting, internal_error, "put_new", 4, True),
    ],
)
def test_weaker_variants_do_not_fit(lane, variant, fault, operation, nth, forever):
    operation = next(known for known in OPERATIONS if known.name == operation)
    store = lane.bucket.spoiled_store("runs", deadline_s=0.05 if forever else 60.0)
    fit = []
    for kind in (S3Place, variant):
        store._place.__class__ = kind
        fit.append(
            fits(operation, lane.outcome(operation, fault, nth=nth, forever=forever, store=store), forever=forever)
        )
    assert fit == [True, False]


def only_on(method, text, fault):
    """A fault for the requests of one kind, and where they are."""
    return {"fault": fault, "where": lambda exchange: exchange.method == method and text in exchange.path}


def refusing(status, code):
    return lambda exchange: exchange.refuse(status, code)


def test_an_upload_that_was_completed_by_a_request_whose_answer_was_lost_counts_as_completed(bucket, s3_proxy):
    completions = []

    def lost_and_then_unknown(exchange):
        completions.append(exchange.body)
        if len(completions) == 1:
            lose_reply(exchange)
        else:
            exchange.refuse(404, "NoSuchUpload")

    store = bucket.spoiled_store()
    s3_proxy.spoil(**only_on("POST", "uploadId=", lost_and_then_unknown), forever=True)
    store.put("x", io.BytesIO(LARGE))
    assert (len(completions), opened(store) == LARGE) == (2, True)


def test_an_upload_that_somebody_aborted_has_failed(bucket, s3_proxy):
    store = bucket.spoiled_store()
    store.put("x", io.BytesIO(OLD))
    s3_proxy.spoil(**only_on("POST", "uploadId=", refusing(404, "NoSuchUpload")), forever=True)
    with pytest.raises(StoreError, match=r"Cannot write 'x' in s3://bucket-\w+/runs/1: FileNotFoundError: spoiled"):
        store.put("x", io.BytesIO(LARGE))
    assert opened(store) == OLD


def test_an_error_that_comes_with_status_200_is_an_error(bucket, s3_proxy):
    def in_the_body(exchange):
        exchange.refuse(200, "InternalError")

    store = bucket.spoiled_store()
    s3_proxy.spoil(**only_on("POST", "uploadId=", in_the_body))
    store.put("x", io.BytesIO(LARGE))
    assert (s3_proxy.spoiled, opened(store) == LARGE) == (1, True)


def test_a_conflict_of_conditional_writes_is_tried_again(bucket, s3_proxy):
    store = bucket.spoiled_store()
    store.put_new("other", b"")
    s3_proxy.spoil(refusing(409, "ConditionalRequestConflict"))
    assert (store.put_new("x", SMALL), s3_proxy.spoiled, opened(store)) == (True, 1, SMALL)


REFUSALS = [(403, "AccessDenied"), (404, "NoSuchBucket"), (400, "InvalidRequest")]
# what is read that is not there is no error, and 400 is an answer to whether the server knows conditions
REFUSED = [
    (operation, *refusal)
    for operation in OPERATIONS
    for refusal in REFUSALS
    if "open" not in operation.name and not (operation.name.startswith("put_new") and refusal[0] == 400)
]


@pytest.mark.parametrize(("operation", "status", "code"), REFUSED, ids=lambda value: getattr(value, "name", value))
def test_a_refusal_is_not_tried_again(lane, operation, status, code):
    said, _ = lane.outcome(operation, refusing(status, code), forever=True)
    assert (said, len(lane.seen)) == (StoreError, 1)


@pytest.mark.parametrize("key", ["x", "folder/x"])
def test_a_bucket_that_is_not_there_is_not_taken_for_an_empty_one(s3_server, s3_environment, key):
    store = RemoteStore("s3://no-such-bucket/runs", endpoint_url=s3_server)
    said = []
    for call in (store.open, store.keys, store.delete, lambda key: store.put_new(key, b"")):
        with pytest.raises(StoreError, match="bucket does not exist") as caught:
            call(key)
        said.append(type(caught.value))
    assert said == [StoreError] * 4


def test_the_answer_to_a_request_that_a_layer_below_sent_again_is_understood(bucket, s3_proxy):
    store = bucket.spoiled_store(deadline_s=0.0)  # it tries once; what comes twice comes from aiohttp
    store.put_new("other", b"")
    s3_proxy.spoil(**only_on("PUT", "/x", lose_reply))
    assert (store.put_new("x", SMALL), [seen.split()[0] for seen in s3_proxy.seen]) == (True, ["PUT", "PUT", "HEAD"])


def test_a_source_that_fails_leaves_no_unfinished_upload(bucket):
    class Failing(io.RawIOBase):
        def chunks(self):
            yield LARGE
            raise ValueError("mine")

    store = bucket.store()
    with pytest.raises(ValueError, match="mine"):
        store.put("x", Failing())
    assert (store.sweep(), list(store.keys(""))) == (0, [])


def test_an_upload_that_could_not_be_aborted_is_told_and_can_be_swept(bucket, s3_proxy, caplog):
    store = bucket.spoiled_store(deadline_s=0.0)
    s3_proxy.spoil(internal_error, nth=2, forever=True)
    with pytest.raises(StoreError):
        store.put("x", io.BytesIO(LARGE))
    s3_proxy.heal()
    told = [record.getMessage() for record in caplog.records if "unfinished upload of runs/1/x" in record.getMessage()]
    assert (len(told), store.sweep(), store.sweep()) == (1, 1, 0)


def test_sweeping_leaves_the_uploads_of_other_folders(bucket, s3_proxy):
    stores = [bucket.spoiled_store(folder, deadline_s=0.0) for folder in ("runs/1", "runs/10")]
    for store in stores:
        s3_proxy.spoil(internal_error, nth=2, forever=True)
        with pytest.raises(StoreError):
            store.put("x", io.BytesIO(LARGE))
        s3_proxy.heal()
    assert [store.sweep() for store in stores] == [1, 1]


def forget_conditions(exchange):
    """What a server does that does not know them."""
    exchange.headers = {name: value for name, value in exchange.headers.items() if name != "If-None-Match"}
    exchange.answer(exchange.forward())


@pytest.mark.parametrize("fault", [forget_conditions, refusing(501, "NotImplemented"), refusing(400, "InvalidRequest")])
def test_a_server_without_conditional_writes_is_found_out_and_told_once(bucket, s3_proxy, caplog, fault):
    store = bucket.spoiled_store()
    s3_proxy.spoil(fault, forever=True, where=lambda exchange: "If-None-Match" in exchange.headers)
    said = [store.put_new("x", b"first"), store.put_new("x", b"second"), store.put_new("y", b"third")]
    told = [record.levelname for record in caplog.records if "does not know conditional writes" in record.getMessage()]
    assert (said, opened(store), told) == ([True, False, True], b"first", ["WARNING"])


def test_what_the_question_about_conditions_leaves_is_no_key(bucket, s3_proxy):
    store = bucket.spoiled_store()
    s3_proxy.spoil(**only_on("DELETE", ".probe-", refusing(403, "AccessDenied")), forever=True)
    assert (store.put_new("x", b""), s3_proxy.spoiled, list(store.keys(""))) == (True, 1, ["x"])


def test_what_another_has_just_written_is_listed_and_read(bucket):
    mine, others = bucket.store(), bucket.store()
    found = []
    for value in (b"1", b"22"):
        found += [list(mine.keys("")), opened(mine)]
        others.put("x", io.BytesIO(value))
    assert [*found, list(mine.keys("")), opened(mine)] == [[], None, ["x"], b"1", ["x"], b"22"]


def test_a_value_that_is_replaced_just_as_it_is_opened_is_the_old_or_the_new(bucket, s3_proxy):
    straight, store = bucket.store(), bucket.spoiled_store()
    straight.put("x", io.BytesIO(OLD))

    def replaced_first(exchange):
        straight.put("x", io.BytesIO(SMALL))
        exchange.answer(exchange.forward())

    s3_proxy.spoil(**only_on("GET", "/x", replaced_first))
    with store.open("x") as file:
        straight.put("x", io.BytesIO(OLD))
        assert (file.read(), s3_proxy.spoiled) == (SMALL, 1)


def test_a_value_that_is_replaced_while_it_is_read_is_not_mixed(bucket):
    store = bucket.store()
    store.put("x", io.BytesIO(LARGE))
    with store.open("x") as file:
        file.read(10)
        store.put("x", io.BytesIO(bytes(len(LARGE))))
        with pytest.raises(StoreError, match="Cannot read 'x'"):
            file.read()


def test_a_forked_process_can_go_on_with_the_store(bucket):
    store = bucket.store()
    store.put("x", io.BytesIO(SMALL))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.put("from the child".replace(" ", "-"), io.BytesIO(store.open("x").read()))
            code = 0
        finally:
            os._exit(code)
    assert (os.waitpid(child, 0)[1], list(store.keys(""))) == (0, ["from-the-child", "x"])


def test_trying_again_draws_nothing_from_pythons_random_stream(lane):
    random.seed(0)
    before = random.getstate()
    lane.outcome(OPERATIONS[1], internal_error, nth=3)
    assert (lane.spoilt, random.getstate() == before) == (1, True)


def test_a_server_that_stops_reading_in_the_middle_of_a_body_is_given_up(bucket, s3_proxy):
    store = bucket.spoiled_store(timeout_s=200.0, attempt_s=1.0)
    s3_proxy.spoil(**only_on("PUT", "partNumber=1", FAULTS["hang"]))
    store.put("x", io.BytesIO(LARGE))
    assert (s3_proxy.spoiled, opened(store) == LARGE) == (1, True)
