"""What counts as a listener, and how foreign callbacks are recognised."""

import functools
import sys
import textwrap

import pytest

from loopline import Binding, Event, Run, at, on
from loopline.core.binding import as_listener, name_of
from loopline.core.errors import AttachError, BadHandler, NotAListener

FOREIGN = """
    class Base:
        def after_step(self): ...

    class Dodgy(Base):
        def __getattr__(self, name):
            raise ZeroDivisionError(f"this object refuses {name}")
"""

DIALECT = """
    from loopline import Binding, at

    class Adapted:
        def __init__(self, foreign):
            self.foreign = foreign

        def bindings(self, run):
            yield Binding(at.STEP_END, lambda run: self.foreign.after_step(), owner=self.foreign)

    class Dialect:
        name = "elsewhere"
        bases = ("elsewhere_callbacks.Base",)

        def adapt(self, foreign):
            return Adapted(foreign)

    DIALECT = Dialect()
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another library, installed with an entry point that says how loopline recognises its callbacks."""
    (tmp_path / "elsewhere_callbacks.py").write_text(textwrap.dedent(FOREIGN))
    (tmp_path / "elsewhere_dialect.py").write_text(textwrap.dedent(DIALECT))
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[loopline.dialects]\nelsewhere = elsewhere_dialect:DIALECT\n")
    monkeypatch.syspath_prepend(tmp_path)
    import elsewhere_callbacks

    yield elsewhere_callbacks
    for name in ("elsewhere_callbacks", "elsewhere_dialect"):
        sys.modules.pop(name, None)


class Bare:
    """A listener of no base class."""

    def __init__(self):
        self.steps = []

    def bindings(self, run):
        yield Binding(at.STEP_END, self.note, owner=self)

    def note(self, run):
        self.steps.append(run.step)


def test_an_object_with_bindings_is_its_own_listener():
    bare = Bare()
    assert as_listener(bare) is bare


def test_a_bare_listener_is_called():
    bare = Bare()
    Run(callbacks=[bare], step=0).emit(at.STEP_END)
    assert bare.steps == [0]


def test_a_class_in_place_of_an_object_is_told_to_be_called():
    with pytest.raises(NotAListener, match=r"^Bare is a class; attach an object of it, for example Bare\(\.\.\.\)\.$"):
        Run(callbacks=[Bare])


def test_a_plain_function_is_told_to_be_marked():
    def report(run): ...

    with pytest.raises(
        NotAListener,
        match=r"^report is a plain function, and nothing says when to call it\. Mark it with @on, for example "
        r"@on\(at\.STEP_END, every=100\)\.$",
    ):
        Run(callbacks=[report])


def test_an_unknown_object_is_told_what_a_listener_is():
    with pytest.raises(
        NotAListener,
        match=r"^An object of .*builtins\.dict is not a listener\. A listener is an object with bindings\(run\): "
        r"subclass loopline\.Callback, or mark a function with @on\. Dialects whose callbacks are recognised: ",
    ):
        Run(callbacks=[{"a": 1}])


def test_what_cannot_be_attached_is_also_a_type_error():
    with pytest.raises(TypeError) as caught:
        Run(callbacks=[None])
    assert isinstance(caught.value, AttachError)


def test_an_object_whose_repr_fails_is_still_refused_with_a_sentence():
    class Shy:
        def __repr__(self):
            raise ZeroDivisionError

    with pytest.raises(NotAListener, match="Shy"):
        Run(callbacks=[Shy()])


def test_a_marked_function_is_called_at_its_event():
    steps = []

    @on(at.STEP_END)
    def note(run):
        steps.append(run.step)

    run = Run(callbacks=[note], step=7)
    run.emit(at.STEP_END)
    run.emit(at.BATCH_END)
    assert steps == [run.step]


def test_a_marked_function_may_hear_several_events():
    heard = []

    @on(at.EPOCH_END)
    @on(at.EPOCH_START)
    def note(run):
        heard.append("called")

    run = Run(callbacks=[note])
    run.emit(at.EPOCH_START)
    run.emit(at.EPOCH_END)
    assert heard == ["called", "called"]


def test_marking_a_function_leaves_it_a_function():
    @on(at.EPOCH_END)
    def double(x):
        return 2 * x

    assert double(2) == 4


def test_a_marked_method_of_any_object_can_be_attached():
    class Model:
        seen = 0

        @on(at.STEP_END)
        def look(self, run):
            self.seen += 1

    model = Model()
    Run(callbacks=[model.look]).emit(at.STEP_END)
    assert model.seen == 1


def test_a_marked_partial_can_be_attached():
    heard = []

    def note(word, run):
        heard.append(word)

    Run(callbacks=[on(at.STEP_END)(functools.partial(note, "hello"))]).emit(at.STEP_END)
    assert heard == ["hello"]


def test_one_function_attached_twice_is_refused_like_one_object_attached_twice():
    @on(at.STEP_END)
    def note(run): ...

    with pytest.raises(AttachError, match="note is attached twice"):
        Run(callbacks=[note, note])


def test_a_foreign_callback_is_recognised_by_the_dotted_name_of_its_base(elsewhere):
    heard = []

    class Theirs(elsewhere.Base):
        def after_step(self):
            heard.append("theirs")

    Run(callbacks=[Theirs()]).emit(at.STEP_END)
    assert heard == ["theirs"]


def test_a_foreign_callback_that_refuses_every_attribute_is_recognised(elsewhere):
    run = Run(callbacks=[elsewhere.Dodgy()])
    run.emit(at.STEP_END)
    assert run.heard(at.STEP_END)


def test_a_foreign_callback_that_refuses_every_attribute_can_be_described(elsewhere):
    assert "Dodgy" in Run(callbacks=[elsewhere.Dodgy()]).plan.describe()


def test_a_class_of_the_same_name_from_elsewhere_is_not_recognised(elsewhere):
    class Base: ...

    with pytest.raises(NotAListener, match=r"Dialects whose callbacks are recognised: .*elsewhere"):
        Run(callbacks=[Base()])


def test_an_object_that_refuses_every_attribute_and_belongs_to_nobody_is_not_a_listener():
    class Dodgy:
        def __getattr__(self, name):
            raise ZeroDivisionError(name)

    with pytest.raises(NotAListener, match="Dodgy"):
        as_listener(Dodgy())


def test_an_object_that_claims_every_attribute_is_not_a_listener():
    class Yes:
        def __getattr__(self, name):
            return lambda *args: ()

    with pytest.raises(NotAListener, match="Yes"):
        as_listener(Yes())


def test_a_function_is_called_by_its_name_and_an_object_by_its_class():
    def report(run): ...

    local = "test_a_function_is_called_by_its_name_and_an_object_by_its_class.<locals>.report"
    assert (name_of(report), name_of(Bare()), name_of(Bare)) == (local, "Bare", "Bare")


def test_what_a_function_cannot_take_is_said_when_it_is_attached():
    @on(at.STEP_END)
    def report(run, values): ...

    with pytest.raises(BadHandler, match=r"report\(run, values\) will be called with the run as its only argument"):
        Run(callbacks=[report])


def test_a_binding_of_a_bare_listener_is_checked_like_any_other():
    class Wrong:
        def bindings(self, run):
            yield Binding(at.STEP_END, self.note, owner=self)

        def note(self): ...

    with pytest.raises(BadHandler, match="note"):
        Run(callbacks=[Wrong()])


@pytest.mark.parametrize("event", [at.STEP_END, Event("own")])
def test_a_binding_with_an_unknown_failure_policy_is_refused(event):
    class Wrong:
        def bindings(self, run):
            yield Binding(event, lambda run: None, owner=self, on_error="ignore")

    with pytest.raises(BadHandler, match="ignore"):
        Run(callbacks=[Wrong()])
