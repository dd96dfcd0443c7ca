"""Callbacks: overridden moments, marked methods, and what is refused when one is attached."""

import pytest

from loopline import Callback, Progress, Run, at, loop, on
from loopline.core.errors import AttachError, BadHandler, UnknownHook
from loopline.core.event import SEAMS


def bound(callback):
    """What a callback is bound to, as names of events."""
    return sorted(binding.event.name for binding in callback.bindings(Run()))


def test_a_callback_that_overrides_nothing_has_no_bindings():
    assert bound(Callback()) == []


def test_an_overridden_moment_is_called_with_the_run():
    given = []

    class Notes(Callback):
        def on_step_end(self, run):
            given.append(run)

    run = Run(callbacks=[Notes()])
    run.emit(at.STEP_END)
    assert given == [run]


@pytest.mark.parametrize("name", SEAMS)
def test_every_seam_can_be_overridden(name):
    heard = []
    notes = type("Notes", (Callback,), {f"on_{name}": lambda self, run: heard.append(name)})()
    Run(callbacks=[notes]).emit(SEAMS[name])
    assert (bound(notes), heard) == ([name], [name])


def test_a_misspelt_moment_is_an_error_that_names_the_nearest():
    class Typo(Callback):
        def on_batch_ends(self, run): ...

    with pytest.raises(UnknownHook) as caught:
        Run(callbacks=[Typo()])
    assert str(caught.value).endswith(
        "Typo.on_batch_ends matches no event and would never be called. Did you mean on_batch_end?"
    )


def test_a_moment_like_no_other_is_pointed_at_the_list():
    class Far(Callback):
        def on_zzz(self, run): ...

    with pytest.raises(UnknownHook, match=r"The events are listed in loopline/core/event\.py\.$"):
        Run(callbacks=[Far()])


def test_a_misspelt_moment_in_a_parent_class_is_found():
    class Parent(Callback):
        def on_step_ends(self, run): ...

    class Child(Parent):
        def on_step_end(self, run): ...

    with pytest.raises(UnknownHook, match="on_step_ends"):
        Run(callbacks=[Child()])


def test_a_misspelt_moment_set_on_the_object_is_an_error():
    callback = Callback()
    callback.on_step_ends = lambda run: None  # type: ignore[attr-defined]
    with pytest.raises(UnknownHook, match="on_step_ends"):
        Run(callbacks=[callback])


def test_a_private_method_may_begin_as_it_likes():
    class Private(Callback):
        def _on_anything(self, run): ...

    assert bound(Private()) == []


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (lambda self: None, "too many positional arguments"),
        (lambda self, run, batch: None, "missing a required argument: 'batch'"),
        (lambda self, run, *, batch: None, "missing a required argument: 'batch'"),
    ],
)
def test_a_handler_that_cannot_take_the_run_alone_is_refused(handler, message):
    with pytest.raises(BadHandler, match=f"will be called with the run as its only argument.*{message}"):
        Run(callbacks=[type("Wrong", (Callback,), {"on_step_end": handler})()])


def test_an_async_handler_is_refused():
    class Later(Callback):
        async def on_step_end(self, run): ...

    with pytest.raises(BadHandler, match=r"Later\.on_step_end is async: calling it would run nothing\."):
        Run(callbacks=[Later()])


def test_a_generator_is_refused_as_a_handler():
    class Yields(Callback):
        def on_step_end(self, run):
            yield run

    with pytest.raises(BadHandler, match=r"Yields\.on_step_end is a generator: calling it would run nothing\."):
        Run(callbacks=[Yields()])


def test_an_async_generator_is_refused_as_a_handler():
    class Yields(Callback):
        async def on_step_end(self, run):
            yield run

    with pytest.raises(BadHandler, match=r"Yields\.on_step_end is "):
        Run(callbacks=[Yields()])


def test_parameters_with_defaults_are_allowed():
    heard = []

    class Defaults(Callback):
        def on_step_end(self, run, more=1, *rest, last=2, **others):
            heard.append((more, rest, last, others))

    Run(callbacks=[Defaults()]).emit(at.STEP_END)
    assert heard == [(1, (), 2, {})]


def test_a_static_or_class_method_is_called_with_the_run():
    heard = []

    class Still(Callback):
        @staticmethod
        def on_step_end(run):
            heard.append("static")

        @classmethod
        def on_epoch_end(cls, run):
            heard.append(cls.__name__)

    run = Run(callbacks=[Still()])
    run.emit(at.STEP_END)
    run.emit(at.EPOCH_END)
    assert heard == ["static", "Still"]


def test_a_function_in_place_of_the_failure_policy_is_told_where_errors_are_heard():
    class Wrong(Callback):
        def on_error(self, run): ...

    with pytest.raises(BadHandler, match=r"Wrong\.on_error is .* To hear of errors, override on_exception\.$"):
        Run(callbacks=[Wrong()])


def test_a_wrong_failure_policy_is_refused():
    class Wrong(Callback):
        on_error = "ignore"

    with pytest.raises(BadHandler, match=r"on_error is 'ignore'; .* can be 'raise', 'warn' or 'disable'"):
        Run(callbacks=[Wrong()])


def test_a_wrong_failure_policy_in_a_mark_is_refused():
    def report(run): ...

    with pytest.raises(AttachError, match="ignore"):
        Run(callbacks=[on(at.STEP_END, on_error="ignore")(report)])  # type: ignore[arg-type]


def test_a_method_may_be_marked_under_any_name():
    class Marked(Callback):
        @on(at.EPOCH_END)
        def report(self, run): ...

    assert bound(Marked()) == ["epoch_end"]


def test_a_method_may_be_marked_for_several_events():
    class Marked(Callback):
        @on(at.EPOCH_START)
        @on(at.EPOCH_END)
        def report(self, run): ...

    assert bound(Marked()) == ["epoch_end", "epoch_start"]


def test_a_mark_on_a_moment_of_that_name_says_how_and_does_not_call_it_twice():
    class Marked(Callback):
        @on(at.STEP_END, every=2)
        def on_step_end(self, run): ...

    assert bound(Marked()) == ["step_end"]


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_mark_above_staticmethod_or_classmethod_is_not_lost(kind):
    heard = []

    class Marked(Callback):
        report = on(at.STEP_END)(kind(lambda *given: heard.append("called")))

    Run(callbacks=[Marked()]).emit(at.STEP_END)
    assert heard == ["called"]


def test_what_a_mark_leaves_open_is_taken_from_the_callback():
    class Marked(Callback):
        order = 5
        ranks = "zero"
        reads = frozenset({"metrics"})
        writes = frozenset({"lr"})
        on_error = "disable"

        @on(at.STEP_END)
        def report(self, run): ...

        @on(at.STEP_END, order=-1, ranks="all", reads=(), writes=["grads"], on_error="raise")
        def other(self, run): ...

    said = {
        (b.order, b.ranks, b.reads, b.writes, b.on_error) for b in Marked().bindings(Run()) if b.event is at.STEP_END
    }
    assert said == {
        (5, "zero", frozenset({"metrics"}), frozenset({"lr"}), "disable"),
        (-1, "all", frozenset(), frozenset({"grads"}), "raise"),
    }


def test_one_name_given_for_reads_is_one_name_and_not_its_letters():
    class Marked(Callback):
        reads = "metrics"  # type: ignore[assignment]

        def on_step_end(self, run): ...

    try:
        (binding,) = Marked().bindings(Run())
    except AttachError:
        return  # refusing it is as good
    assert binding.reads == frozenset({"metrics"})


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", None])
def test_every_is_a_whole_number_above_zero(wrong):
    with pytest.raises(BadHandler, match="every is a whole number, 1 or more"):
        on(at.STEP_END, every=wrong)


def test_an_event_by_its_name_is_refused():
    with pytest.raises(BadHandler, match=r"^@on\('step_end'\): an event is an object such as at\.STEP_END, not a str"):
        on("step_end")  # type: ignore[arg-type]


def test_every_counts_steps_by_the_runs_progress():
    steps = []

    @on(at.STEP_END, every=3)
    def note(run):
        steps.append(run.step)

    train(Run(callbacks=[note]), epochs=2)
    assert steps == [2, 5]


def test_every_keeps_the_beat_over_a_resume():
    steps = []

    class Notes(Callback):
        @on(at.STEP_END, every=3)
        def note(self, run):
            steps.append(run.step)

    first = Run(callbacks=[Notes()])
    train(first, epochs=1)
    train(Run(callbacks=[Notes()], progress=Progress(**_counts(first))), epochs=3)
    assert steps == [2, 5, 8, 11]


@pytest.mark.parametrize(
    ("event", "every", "expected"),
    [
        (at.BATCH_START, 4, [3, 7]),
        (at.BATCH_END, 4, [3, 7]),
        (at.STEP_START, 4, [3, 7]),
        (at.EPOCH_START, 2, [4]),
        (at.EPOCH_END, 2, [7]),
        (at.PASS_END, 2, [7]),
    ],
)
def test_every_fits_the_event(event, every, expected):
    batches = []

    @on(event, every=every)
    def note(run):
        batches.append(run.progress.batches - (event in (at.EPOCH_END, at.PASS_END)))

    train(Run(callbacks=[note]), epochs=2)
    assert batches == expected


def test_every_of_an_uncounted_event_survives_another_listener():
    heard = []

    @on(at.EVAL_END, every=2)
    def note(run):
        heard.append(len(run.listeners))

    run = Run(callbacks=[note])
    for _ in range(4):
        run.emit(at.EVAL_END)
        run.listen(Callback())
    assert heard == [2, 4]


def test_marking_a_method_that_is_bound_already_is_refused_with_a_sentence():
    with pytest.raises(BadHandler, match="on_step_end"):
        on(at.STEP_END)(Callback().on_step_end)


def test_two_beats_on_one_function_do_not_disturb_each_other():
    heard = []

    @on(at.EVAL_END, every=2)
    @on(at.EVAL_END, every=3)
    def note(run):
        heard.append(run.scratch["calls"])

    run = Run(callbacks=[note])
    for run.scratch["calls"] in (1, 2, 3, 4, 5, 6):
        run.emit(at.EVAL_END)
    assert heard == [2, 3, 4, 6, 6]


def test_what_a_callback_keeps_is_not_asked_whether_it_is_marked():
    class Remote:
        def __call__(self): ...

        def __getattr__(self, name):
            raise ZeroDivisionError(name)

    class Keeps(Callback):
        def __init__(self):
            self.remote = Remote()

        def on_step_end(self, run): ...

    assert bound(Keeps()) == ["step_end"]


def test_a_handler_set_on_the_object_is_called():
    heard = []
    callback = Callback()
    callback.on_step_end = lambda run: heard.append("called")  # type: ignore[method-assign]
    Run(callbacks=[callback]).emit(at.STEP_END)
    assert heard == ["called"]


def test_a_handler_set_on_the_object_replaces_that_of_the_class():
    heard = []

    class Notes(Callback):
        def on_step_end(self, run):
            heard.append("class")

    notes = Notes()
    notes.on_step_end = lambda run: heard.append("object")  # type: ignore[method-assign]
    Run(callbacks=[notes]).emit(at.STEP_END)
    assert heard == ["object"]


def test_moments_of_a_parent_class_and_of_a_mixin_are_found():
    class Mixin:
        def on_epoch_end(self, run): ...

        @on(at.SETUP)
        def prepare(self, run): ...

    class Parent(Callback):
        def on_step_end(self, run): ...

    class Child(Mixin, Parent): ...

    assert bound(Child()) == ["epoch_end", "setup", "step_end"]


def test_a_child_that_takes_back_a_moment_is_not_called():
    class Parent(Callback):
        def on_step_end(self, run): ...

    class Child(Parent):
        on_step_end = Callback.on_step_end

    assert bound(Child()) == []


def test_a_callback_with_slots_can_be_attached():
    class Slotted(Callback):
        __slots__ = ("count",)

        def on_step_end(self, run): ...

    assert bound(Slotted()) == ["step_end"]


def test_marked_methods_of_one_event_are_called_in_the_order_in_which_they_are_written():
    heard = []

    class Marked(Callback):
        @on(at.STEP_END)
        def second_by_name(self, run):
            heard.append("written first")

        @on(at.STEP_END)
        def first_by_name(self, run):
            heard.append("written second")

    Run(callbacks=[Marked()]).emit(at.STEP_END)
    assert heard == ["written first", "written second"]


def test_a_callback_without_state_has_an_empty_one_under_its_class_name():
    callback = Callback()
    assert (callback.state_key, callback.state_dict(), callback.load_state_dict({})) == ("Callback", {}, None)


def train(run, epochs):
    with loop.fit(run):
        for _ in loop.epochs(run, epochs):
            for _ in loop.batches(run, [0, 1, 2, 3]):
                pass


def _counts(run):
    return {name: getattr(run.progress, name) for name in ("epochs", "steps", "batches", "samples")}
