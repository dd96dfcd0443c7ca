"""A call that hangs is ended, and whatever else goes by alarms is left as it was."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time

import pytest

from loopline.core.limit import within

LIMIT_S = 0.02


@pytest.fixture(autouse=True)
def no_other_alarm():
    """The limit that pytest has on this test waits meanwhile."""
    theirs, timer = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.signal(signal.SIGALRM, theirs)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def alarm():
    """Who hears the alarm, and whether it is set."""
    return signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0


def sleeps():
    time.sleep(60)


def computes():
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        pass


def reads_a_socket():
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.recv(1)


def waits_for_a_lock():
    lock = threading.Lock()
    with lock:
        lock.acquire(timeout=60)


def tries_again():
    while True:
        try:
            time.sleep(60)
        except Exception:  # noqa: BLE001 - as people write it
            continue


def takes_the_alarm_for_an_error():
    try:
        time.sleep(60)
    except:  # noqa: E722 - as people write it
        return


def sorts():
    """One call outside of Python's own loop, which looks for no signal."""
    sorted([random.random() for _ in range(2000)] * 200)


@pytest.mark.parametrize(
    "hangs",
    [sleeps, computes, reads_a_socket, waits_for_a_lock, tries_again, takes_the_alarm_for_an_error, sorts],
    ids=lambda hangs: hangs.__name__,
)
def test_a_call_that_hangs_is_a_timeout_error(hangs):
    before = alarm()
    with pytest.raises(TimeoutError, match=r"^took longer than 0\.02 s and was cut off; .* careful = True"):
        within(LIMIT_S, hangs)
    assert alarm() == before


def test_a_plain_alarm_is_swallowed_and_stays_behind():
    """What the tests above find wrong with it."""

    def naive(limit_s, function):
        def ring(number, frame):
            raise TimeoutError

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        function()

    before = alarm()
    naive(LIMIT_S, takes_the_alarm_for_an_error)  # no TimeoutError comes out
    assert alarm() != before


def test_the_error_says_where_it_hung():
    with pytest.raises(TimeoutError) as caught:
        within(LIMIT_S, sleeps)
    cut = caught.value.__cause__
    assert cut is not None
    assert [frame.name for frame in caught.traceback][-1] == "within"
    assert "sleeps" in [frame.name for frame in pytest.ExceptionInfo.from_exception(cut).traceback]


def test_a_call_that_is_over_in_time_is_a_call():
    heard = []
    before = alarm()
    within(60, lambda *given, **named: heard.append((given, named)), 1, function=2)
    assert (heard, alarm()) == ([((1,), {"function": 2})], before)


def test_an_error_of_the_call_is_its_own():
    before = alarm()
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 / 0)
    assert alarm() == before


def test_an_alarm_of_somebody_else_goes_on():
    rang = []
    signal.signal(signal.SIGALRM, theirs := lambda number, frame: rang.append(number))
    signal.setitimer(signal.ITIMER_REAL, 60, 7)
    with pytest.raises(TimeoutError):
        within(LIMIT_S, sleeps)
    left_s, every_s = signal.getitimer(signal.ITIMER_REAL)
    assert (signal.getsignal(signal.SIGALRM) is theirs, 0 < left_s < 60, every_s, rang) == (True, True, 7, [])


def test_an_alarm_that_was_due_meanwhile_rings_afterwards():
    heard = []
    signal.signal(signal.SIGALRM, lambda number, frame: heard.append("alarm"))
    signal.setitimer(signal.ITIMER_REAL, 0.01)

    def call():
        time.sleep(0.05)
        heard.append("call")

    within(60, call)
    time.sleep(0.01)
    assert heard == ["call", "alarm"]


def test_an_alarm_that_the_call_sets_is_left_alone():
    mine = lambda number, frame: None  # noqa: E731 - to be known again

    def call():
        signal.signal(signal.SIGALRM, mine)
        signal.setitimer(signal.ITIMER_REAL, 60)

    within(30, call)
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    assert (signal.getsignal(signal.SIGALRM) is mine, left_s > 30) == (True, True)


def test_a_limit_inside_another_ends_only_what_is_inside():
    said = []

    def outer():
        with pytest.raises(TimeoutError):
            within(LIMIT_S, sleeps)
        said.append("went on")

    within(60, outer)
    assert said == ["went on"]


def test_a_limit_around_another_ends_both():
    with pytest.raises(TimeoutError, match=r"0\.02 s"):
        within(LIMIT_S, within, 0.2, sleeps)


def test_on_another_thread_there_is_no_limit():
    said = []

    def call():
        time.sleep(5 * LIMIT_S)
        said.append("done")

    thread = threading.Thread(target=within, args=(LIMIT_S, call))
    thread.start()
    thread.join(30)
    assert said == ["done"]


def test_who_steps_through_the_code_is_not_cut_off():
    names = {"__name__": "bdb", "time": time}
    exec("def steps():\n    time.sleep(0.1)\n    done.append(True)", names)
    names["done"] = []
    within(LIMIT_S, names["steps"])
    assert names["done"] == [True]


def test_a_call_that_ends_about_when_the_alarm_rings_is_either_over_or_cut_off():
    before = alarm()
    source, ends = random.Random(0), []
    for _ in range(300):
        until = time.monotonic() + source.uniform(0.0015, 0.0025)

        def call(until=until):
            while time.monotonic() < until:
                pass

        try:
            within(0.002, call)
            ends.append("over")
        except TimeoutError:
            ends.append("cut off")
        assert alarm() == before
    assert set(ends) == {"over", "cut off"}
