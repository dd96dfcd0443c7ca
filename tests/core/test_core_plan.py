"""The plan: who is called at each event, in which order, and why."""

import dataclasses
from dataclasses import dataclass

import pytest

from loopline import Binding, Callback, Event, Run, at, on
from loopline.core.comm import ALONE, Alone
from loopline.core.errors import BadHandler, DuplicateState, OrderCycle


def acts(name, heard=None, **attributes):
    """A callback that says its name at the end of a step."""

    def on_step_end(self, run):
        if heard is not None:
            heard.append(name)

    return type(name, (Callback,), {"on_step_end": on_step_end, "__qualname__": name, **attributes})()


def order_of(*listeners, **given):
    plan = Run(callbacks=listeners, **given).plan
    return [type(binding.owner).__name__ for binding in plan.bindings.get(at.STEP_END, ())]


def needs(*names):
    return frozenset(names)


def test_equal_orders_keep_the_order_of_attachment():
    assert order_of(acts("C"), acts("A"), acts("B")) == ["C", "A", "B"]


def test_a_smaller_order_is_called_first():
    assert order_of(acts("Late", order=10), acts("Middle"), acts("Early", order=-10)) == ["Early", "Middle", "Late"]


def test_a_writer_comes_before_a_reader_whatever_their_order():
    reader = acts("Reader", reads=needs("metrics"), order=-100)
    writer = acts("Writer", writes=needs("metrics"), order=100)
    assert order_of(reader, writer) == ["Writer", "Reader"]


def test_one_metric_is_part_of_all_metrics():
    one = acts("One", reads=needs("metrics/val/loss"))
    every = acts("Every", writes=needs("metrics"))
    assert order_of(one, every) == ["Every", "One"]


def test_a_reader_of_all_metrics_comes_after_the_writer_of_one():
    assert order_of(acts("All", reads=needs("metrics")), acts("One", writes=needs("metrics/val/f1"))) == ["One", "All"]


@pytest.mark.parametrize(("read", "written"), [("val/loss_a", "val/loss"), ("val/loss", "val/loss_a")])
def test_names_that_only_begin_alike_are_different_data(read, written):
    assert order_of(acts("Reader", reads=needs(read)), acts("Writer", writes=needs(written))) == ["Reader", "Writer"]


def test_an_editor_comes_after_those_that_write_and_before_those_that_read():
    reader = acts("Reader", reads=needs("grads"))
    editor = acts("Editor", reads=needs("grads"), writes=needs("grads"))
    writer = acts("Writer", writes=needs("grads"))
    assert order_of(reader, editor, writer) == ["Writer", "Editor", "Reader"]


def test_two_editors_of_one_thing_go_by_their_order():
    grads = {"reads": needs("grads"), "writes": needs("grads")}
    assert order_of(acts("Second", order=2, **grads), acts("First", order=1, **grads)) == ["First", "Second"]


def test_those_who_wait_for_a_writer_let_the_others_pass():
    reader = acts("Reader", reads=needs("lr"), order=-5)
    other = acts("Other")
    writer = acts("Writer", writes=needs("lr"), order=5)
    assert order_of(reader, other, writer) == ["Other", "Writer", "Reader"]


def test_a_circle_of_reads_and_writes_is_an_error_that_walks_around_it():
    with pytest.raises(OrderCycle) as caught:
        Run(
            callbacks=[
                acts("A", reads=needs("lr"), writes=needs("grads")),
                acts("B", reads=needs("grads"), writes=needs("lr")),
            ]
        )
    assert str(caught.value) == (
        "At step_end no order satisfies everybody: A writes grads, which B reads; B writes lr, which A reads. "
        "Let one of them act at another event, or drop a read or write that it does not need."
    )


def test_a_circle_of_three_names_all_three_and_not_those_who_wait_behind_it():
    with pytest.raises(OrderCycle) as caught:
        Run(
            callbacks=[
                acts("Behind", reads=needs("a")),
                acts("A", reads=needs("c"), writes=needs("a")),
                acts("B", reads=needs("a"), writes=needs("b")),
                acts("C", reads=needs("b"), writes=needs("c")),
            ]
        )
    assert str(caught.value) == (
        "At step_end no order satisfies everybody: A writes a, which B reads; B writes b, which C reads; "
        "C writes c, which A reads. "
        "Let one of them act at another event, or drop a read or write that it does not need."
    )


def test_reads_and_writes_at_different_events_make_no_circle():
    class A(Callback):
        @on(at.STEP_END, reads=["lr"], writes=["grads"])
        def act(self, run): ...

    class B(Callback):
        @on(at.EPOCH_END, reads=["grads"], writes=["lr"])
        def act(self, run): ...

    plan = Run(callbacks=[A(), B()]).plan
    assert (len(plan[at.STEP_END]), len(plan[at.EPOCH_END])) == (1, 1)


@dataclass
class Listens:
    """A bare listener with one binding, of which everything can be said."""

    name: str
    heard: list[str]
    then: int = 0
    order: int = 0
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()

    def bindings(self, run):
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        name, heard = given.pop("name"), given.pop("heard")
        yield Binding(at.STEP_END, lambda run: heard.append(name), owner=self, **given)


def test_then_sorts_before_order_and_before_data():
    heard = []
    second = Listens("second", heard, then=8, order=-10, writes=needs("grads"))
    first = Listens("first", heard, then=1, reads=needs("grads"), order=10)
    Run(callbacks=[second, first]).emit(at.STEP_END)
    assert heard == ["first", "second"]


@dataclass(frozen=True)
class Rank(Alone):
    rank: int = 3
    local_rank: int = 0
    world_size: int = 1


@pytest.mark.parametrize(
    ("ranks", "comm", "called"),
    [
        ("all", ALONE, True),
        ("all", Rank(3), True),
        ("zero", ALONE, True),
        ("zero", Rank(3), False),
        ("local_zero", Rank(3, local_rank=0), True),
        ("local_zero", Rank(3, local_rank=1), False),
        (lambda comm: comm.rank == 3, Rank(3), True),
        (lambda comm: comm.rank == 3, ALONE, False),
    ],
)
def test_a_handler_is_called_on_its_ranks_only(ranks, comm, called):
    on_this_rank = {"ranks": staticmethod(ranks) if callable(ranks) else ranks}
    assert order_of(acts("One", **on_this_rank), comm=comm) == (["One"] if called else [])


def test_bindings_of_other_ranks_are_known_on_every_rank():
    here, there = (Run(callbacks=[acts("One", ranks="zero")], comm=comm).plan for comm in (ALONE, Rank(3)))
    assert (here.everywhere, there[at.STEP_END]) == (there.everywhere, ())


def test_a_wrong_word_for_ranks_is_an_error_that_lists_the_right_ones():
    with pytest.raises(BadHandler) as caught:
        Run(callbacks=[acts("One", ranks="main")])
    assert str(caught.value) == ("One.ranks is 'main'; it can be 'all', 'zero', 'local_zero' or a function of a comm.")


@pytest.mark.parametrize("order", ["first", None])
def test_an_order_that_is_no_number_is_an_error_that_names_its_owner(order):
    with pytest.raises(BadHandler, match="One"):
        Run(callbacks=[acts("One", order=order), acts("Two")])


class Wraps(Callback):
    """Writes its word before and after every handler."""

    def __init__(self, word, heard):
        self.word, self.heard = word, heard

    def wrap_handler(self, run, binding, handler):
        def wrapped(run, **payload):
            self.heard.append(f"{self.word}>")
            handler(run, **payload)
            self.heard.append(f"<{self.word}")

        return wrapped


def test_a_wrapper_is_around_every_handler_and_a_later_one_is_outside():
    heard = []
    Run(callbacks=[Wraps("a", heard), acts("One", heard), Wraps("b", heard)]).emit(at.STEP_END)
    assert heard == ["b>", "a>", "One", "<a", "<b"]


def test_a_wrapper_is_told_whose_handler_it_wraps():
    told = []

    class Asks(Callback):
        def wrap_handler(self, run, binding, handler):
            told.append((binding.event, binding.owner))
            return handler

    one = acts("One")
    Run(callbacks=[one, Asks()])
    assert told == [(at.STEP_END, one)]


def test_an_error_of_a_wrapped_handler_still_names_its_owner():
    class Fails(Callback):
        def on_step_end(self, run):
            raise ValueError("no")

    Fails.__qualname__ = "Fails"
    with pytest.raises(ValueError, match="no") as caught:
        Run(callbacks=[Wraps("a", []), Fails()]).emit(at.STEP_END)
    assert caught.value.__notes__ == ["raised by Fails at step_end, epoch 0, step 0"]


def test_one_object_attached_twice_is_an_error():
    one = acts("One")
    with pytest.raises(DuplicateState) as caught:
        Run(callbacks=[one, one])
    assert str(caught.value) == "One is attached twice: the same object. Make two objects, or drop one."


class Counts(Callback):
    """Keeps a state."""

    def __init__(self, key="Counts"):
        self.key = key

    @property
    def state_key(self):
        return self.key

    def state_dict(self):
        return {"count": 1}


def test_two_states_under_one_key_are_an_error():
    with pytest.raises(DuplicateState) as caught:
        Run(callbacks=[Counts(), Counts()])
    assert str(caught.value) == (
        "Counts and Counts both save state under the key 'Counts'; one would overwrite the other. Give them different "
        "keys through their state_key."
    )


def test_two_of_one_class_with_two_keys_are_fine():
    assert len(Run(callbacks=[Counts("a"), Counts("b")]).listeners) == 2


def test_two_of_one_class_without_state_are_fine():
    assert order_of(acts("One"), acts("One")) == ["One", "One"]


def test_two_states_under_one_key_are_an_error_even_if_the_callbacks_are_empty_containers():
    class Empty(Counts):
        def __len__(self):
            return 0

    with pytest.raises(DuplicateState):
        Run(callbacks=[Empty(), Empty()])


def test_an_event_that_nobody_hears_has_no_handlers():
    plan = Run().plan
    assert (plan[at.STEP_END], plan[Event("own")]) == ((), ())


def test_a_plan_is_in_loop_order_with_own_events_last():
    own = Event("own")

    class Many(Callback):
        def on_teardown(self, run): ...

        @on(own)
        def heard(self, run): ...

        def on_setup(self, run): ...

    assert list(Run(callbacks=[Many()]).plan.bindings) == [at.SETUP, at.TEARDOWN, own]


def test_the_table_for_people():
    class Progress(Callback):
        order = 100

        def on_step_end(self, run): ...

        def on_epoch_end(self, run): ...

    class Accuracy(Callback):
        writes = frozenset({"metrics/val/accuracy"})

        def on_epoch_end(self, run): ...

    class Stop(Callback):
        reads = frozenset({"metrics"})
        ranks = "zero"

        def on_epoch_end(self, run): ...

    @on(at.STEP_END, ranks=lambda comm: comm.rank < 2)
    def report(run): ...

    for named in (Progress, Accuracy, Stop, report):
        named.__qualname__ = named.__name__
    assert Run(callbacks=[Progress(), Stop(), Accuracy(), report]).plan.describe() == (
        "event      #  callback  order  ranks   why\n"
        "step_end   1  report    0      a test  as attached\n"
        "           2  Progress  100    all     order 100\n"
        "epoch_end  1  Accuracy  0      all     as attached\n"
        "           2  Stop      0      zero    reads metrics/val/accuracy from Accuracy\n"
        "           3  Progress  100    all     order 100"
    )


def test_a_long_name_does_not_push_the_columns_of_the_table_apart():
    class AVeryLongNameForACallbackThatSomebodyWrote(Callback):
        def on_step_end(self, run): ...

    long = AVeryLongNameForACallbackThatSomebodyWrote
    long.__qualname__ = long.__name__
    head, *rows = Run(callbacks=[long(), acts("Short")]).plan.describe().splitlines()
    assert {row.index(" all ") + 1 for row in rows} == {head.index("ranks")}


def test_the_table_of_nobody_is_its_head():
    assert Run().plan.describe() == "event  #  callback  order  ranks  why"
