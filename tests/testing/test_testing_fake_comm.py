from __future__ import annotations

import threading

import pytest

from loopline import Callback, Comm, Run, loop
from loopline.core.errors import RankMismatch
from loopline.testing import FakeComm, run_ranks


def test_it_is_a_comm():
    assert isinstance(FakeComm(), Comm)


def test_any_is_true_where_one_rank_says_so():
    assert run_ranks(lambda comm: comm.any(comm.rank == 1, False, True), 3) == [(True, False, True)] * 3


def test_gather_gives_every_rank_the_values_in_order():
    assert run_ranks(lambda comm: comm.gather({"rank": comm.rank}), 3) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


@pytest.mark.parametrize("src", [0, 2])
def test_broadcast_gives_every_rank_the_value_of_one(src):
    assert run_ranks(lambda comm: comm.broadcast(f"from {comm.rank}", src), 3) == [f"from {src}"] * 3


def test_what_is_exchanged_is_a_copy():
    mine = {}

    def share(comm):
        value = mine[comm.rank] = [comm.rank]
        return comm.gather(value)

    shared = run_ranks(share, 2)
    assert (shared, any(got is mine[rank] for of_rank in shared for rank, got in enumerate(of_rank))) == (
        [[[0], [1]]] * 2,
        False,
    )


def test_nobody_passes_a_barrier_before_the_last_has_come():
    here = []

    def meet(comm):
        here.append(comm.rank)
        comm.barrier("all must be here")
        return len(here)

    assert run_ranks(meet, 4) == [4, 4, 4, 4]


def test_many_meetings_in_a_row_do_not_mix():
    def play(comm):
        return [comm.gather((comm.rank, i)) for i in range(50)]

    assert run_ranks(play, 3) == [[[(0, i), (1, i), (2, i)] for i in range(50)]] * 3


def test_who_does_not_come_is_named_with_the_reason_for_the_barrier():
    held = threading.Event()

    def play(comm):
        if comm.rank == 1:
            held.wait(5)
        else:
            try:
                comm.barrier("saving")
            finally:
                held.set()

    with pytest.raises(TimeoutError) as caught:
        run_ranks(play, 3, timeout_s=0.05)
    assert str(caught.value) == "Rank 1 did not come to barrier('saving') within 0.05 s; there wait ranks 0, 2."


def test_ranks_that_call_different_things_are_told_which():
    def play(comm):
        return comm.barrier("end") if comm.rank else comm.gather(1)

    with pytest.raises(RuntimeError, match=r"met at different calls: rank 0 at gather; rank 1 at barrier\('end'\)"):
        run_ranks(play, 2)


def test_an_error_keeps_its_type_and_names_its_rank():
    error = KeyError("mine")

    def play(comm):
        if comm.rank == 1:
            raise error
        comm.barrier("never")

    with pytest.raises(KeyError) as caught:
        run_ranks(play, 3)
    assert (caught.value is error, caught.value.__notes__) == (True, ["on rank 1"])


def test_several_errors_are_all_told():
    def play(comm):
        raise ValueError(f"error {comm.rank}")

    with pytest.raises(ValueError, match="error 0") as caught:
        run_ranks(play, 2)
    assert caught.value.__notes__ == ["on rank 0", "rank 1 failed too: ValueError: error 1"]


def test_nobody_waits_for_a_rank_that_has_finished():
    def play(comm):
        if comm.rank == 0:
            comm.barrier("alone")

    with pytest.raises(RuntimeError, match=r"Nobody can meet at barrier\('alone'\) any more: rank 1 has finished"):
        run_ranks(play, 2, timeout_s=60)


def test_a_rank_that_leaves_after_a_meeting_spoils_nothing_for_the_others():
    for _ in range(30):
        assert run_ranks(lambda comm: comm.gather(comm.rank), 4) == [[0, 1, 2, 3]] * 4


def test_calls_are_recorded():
    comm = FakeComm(rank=1, world_size=2)
    comm.any(True, False), comm.gather("x"), comm.broadcast(3), comm.barrier("end")
    assert comm.calls == [("any", (True, False)), ("gather", "x"), ("broadcast", 3), ("barrier", "end")]


def test_one_by_itself_is_answered_as_if_all_had_said_the_same():
    comm = FakeComm(rank=1, world_size=3)
    assert (comm.any(True, False), comm.gather("x"), comm.broadcast("y", 2)) == ((True, False), ["x"] * 3, "y")


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_an_error(rank, size):
    with pytest.raises(ValueError, match=f"FakeComm\\(rank={rank}, world_size={size}\\)"):
        FakeComm(rank, size)


def test_a_broadcast_from_outside_the_world_is_an_error():
    with pytest.raises(ValueError, match=r"broadcast\(src=5\): ranks go from 0 to 1"):
        FakeComm(0, 2).broadcast(1, 5)


class Listens(Callback):
    def on_batch_end(self, run):
        pass


def test_ranks_with_different_listeners_are_refused_at_setup():
    def play(comm):
        with loop.fit(Run(callbacks=[Listens()] if comm.rank else [], comm=comm)):
            pass

    with pytest.raises(RankMismatch, match="do not hold the same listeners; they differ in: batch_end Listens"):
        run_ranks(play, 2)


def test_ranks_whose_listeners_act_on_one_rank_only_agree():
    class OnZero(Listens):
        ranks = "zero"

    def play(comm):
        run = Run(callbacks=[OnZero()], comm=comm)
        with loop.fit(run):
            pass
        return run.status

    assert run_ranks(play, 2) == ["completed", "completed"]
