"""Running means, the latest values of metrics, and waiting for a new one."""

import copy
import math
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopline import Run, loop
from loopline.core.errors import BadStep, MissingMetric
from loopline.metrics import Mean, Metrics, Watched, missing, numbers, ratio

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
}

numbers_in_bounds = st.floats(-1e3, 1e3, width=16)
weights_in_bounds = st.one_of(st.integers(1, 512), st.floats(0.0625, 64, width=16))


def made(number, kind):
    """A number as a plain one or as a tensor of some kind, and the same number as float64 sees it."""
    if kind == "plain":
        return number, float(number)
    tensor = torch.tensor(number).to(DTYPES[kind])
    return tensor, float(tensor.to(torch.float64))


kinds = st.sampled_from(["plain", *DTYPES])
weight_kinds = st.sampled_from(["plain", "float32", "float64", "float16"])
alike = st.tuples(kinds, weight_kinds).flatmap(
    lambda both: st.lists(
        st.tuples(numbers_in_bounds, st.just(both[0]), weights_in_bounds, st.just(both[1])), min_size=1, max_size=150
    )
)
mixed = st.lists(st.tuples(numbers_in_bounds, kinds, weights_in_bounds, weight_kinds), min_size=1, max_size=150)


@given(st.one_of(alike, mixed))
def test_a_mean_is_the_weighted_mean_in_float64(rows):
    mean, total, weights = Mean(), [], []
    for number, kind, weight, weight_kind in rows:
        value, exact = made(number, kind)
        share, exact_share = made(weight, weight_kind)
        mean.add(value, share)
        total.append(exact * exact_share)
        weights.append(exact_share)
    scale = math.fsum(map(abs, total)) / math.fsum(weights)
    assert abs(float(mean.compute()) - math.fsum(total) / math.fsum(weights)) <= 1e-12 * max(scale, 1e-9)


def test_many_small_numbers_beside_a_large_one_are_not_lost():
    mean = Mean()
    for value in [2.0**24, *[1.0] * 2**10]:
        mean.add(torch.tensor(value))
    assert float(mean.sums()[0]) == 2.0**24 + 2**10


def test_half_precision_values_are_added_up_in_wide_ones():
    mean = Mean()
    for _ in range(4096):
        mean.add(torch.tensor(16.0, dtype=torch.float16))
    assert float(mean.sums()[0]) == 65536.0


def test_reading_a_mean_changes_nothing():
    mean = Mean()
    for value in range(100):
        mean.add(torch.tensor(float(value)))
    assert [float(mean.compute()) for _ in range(3)] == [49.5] * 3


def test_a_mean_of_nothing_is_not_a_number():
    assert math.isnan(Mean().compute())


def test_a_mean_of_what_weighs_nothing_is_not_a_number():
    plain, tensors = Mean(), Mean()
    plain.add(1.0, 0)
    tensors.add(torch.tensor(1.0), torch.tensor(0.0))
    assert (math.isnan(plain.compute()), math.isnan(float(tensors.compute()))) == (True, True)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 200])
def test_a_mean_goes_on_from_its_state(count):
    mean, other = Mean(), Mean()
    for value in range(count):
        mean.add(torch.tensor(float(value)), weight=value + 1)
    other.load_state_dict(mean.state_dict())
    for each in (mean, other):
        each.add(3.0, weight=7)
    assert float(other.compute()) == float(mean.compute())


def test_a_state_that_was_taken_does_not_move_with_the_mean():
    mean = Mean()
    mean.add(1.0)
    state = mean.state_dict()
    before = copy.deepcopy(state)
    mean.add(2.0)
    assert state == before


@pytest.mark.parametrize("wild", [[math.inf, -math.inf], [1e308, 1e308], [math.nan, 1.0], [-math.inf, 2.0]])
def test_plain_numbers_that_run_away_are_no_error(wild):
    plain, tensors = Mean(), Mean()
    for value in wild:
        plain.add(value)
        tensors.add(torch.tensor(value, dtype=torch.float64))
    assert repr(float(plain.compute())) == repr(float(tensors.compute()))


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, torch.nn.Parameter, bool])
def test_a_mean_takes_numbers_of_every_kind_as_values(kind):
    metrics = Metrics()
    for number in (1.0, 0.0):
        value = torch.tensor(number) if kind is torch.nn.Parameter else number
        metrics.add("val/right", kind(value), 3)
    assert metrics["val/right"] == 0.5


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, torch.tensor, bool])
@pytest.mark.parametrize("value", [float, torch.tensor])
def test_a_mean_takes_numbers_of_every_kind_as_weights(kind, value):
    metrics = Metrics()
    metrics.add("val/right", value(1.0), kind(1))
    metrics.add("val/right", value(0.0), 3)
    assert metrics["val/right"] == 0.25


def test_a_weight_in_a_tensor_of_one_number_weighs_like_that_number():
    mean = Mean()
    for value, weight in ((1.0, 1), (2.0, 3)):
        mean.add(torch.tensor(value), torch.tensor([float(weight)]))
    assert float(mean.compute()) == 1.75


def test_a_weight_of_several_numbers_is_refused():
    metrics = Metrics()
    with pytest.raises(BadStep, match="weight"):
        metrics.add("train/loss", torch.tensor(1.0), torch.ones(3))


@pytest.fixture
def hasty_threads():
    """Threads that take turns all the time, so that a race shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(("kind", "count"), [(float, 60_000), (torch.tensor, 100_000)], ids=["numbers", "tensors"])
def test_a_mean_is_read_whole_while_another_thread_adds(hasty_threads, kind, count):
    """Value and weight are equal, so that half of a fold, or a value without its weight, would show."""
    mean, stop, wrong, reads = Mean(), threading.Event(), [], []

    def read():
        while not stop.is_set():
            try:
                total, weights = map(float, mean.sums())
            except Exception as error:  # noqa: BLE001 - shown by the assertion below
                wrong.append(error)
                continue
            reads.append(weights)
            if total % 1 or weights != (total // 2) * 1.25 + (0.25 if total % 2 else 0.0):
                wrong.append((total, weights))

    reader = threading.Thread(target=read)
    reader.start()
    one, four = kind(1.0), kind(4.0)
    for i in range(count):
        mean.add(*((one, 1) if i % 2 else (four, 0.25)))
    stop.set()
    reader.join()
    total, weights = map(float, mean.sums())
    assert (wrong, reads == sorted(reads), len(reads) > 0, total, weights) == ([], True, True, count, count * 0.625)


def test_names_can_be_listed_while_another_thread_logs_new_ones(hasty_threads):
    metrics, stop, wrong = Metrics(), threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                metrics.fresh("train")
                list(metrics)
                dict(metrics)
            except RuntimeError as error:
                wrong.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(3_000):
        metrics.add(f"train/{i}", 1.0)
    stop.set()
    reader.join()
    assert wrong == []


def test_metrics_are_a_mapping_of_numbers():
    metrics = Metrics({"val/loss": 1.5})
    metrics.add("train/loss", torch.tensor(2.0))
    metrics.add("train/loss", torch.tensor(4.0))
    metrics["own/number"] = torch.tensor(7)
    assert dict(metrics) == {"val/loss": 1.5, "train/loss": 3.0, "own/number": 7.0}


def test_a_metric_can_be_deleted_and_counted():
    metrics = Metrics({"a/b": 1.0, "a/c": 2.0})
    del metrics["a/b"]
    assert (len(metrics), "a/b" in metrics, metrics.get("a/b")) == (1, False, None)


def test_metrics_show_their_numbers():
    assert repr(Metrics({"a/b": 1})) == "Metrics({'a/b': 1.0})"


def test_a_logged_tensor_keeps_no_graph():
    metrics = Metrics()
    metrics.add("train/loss", torch.tensor(1.0, requires_grad=True) * 2)
    assert metrics.entry("train/loss").compute().requires_grad is False


def test_a_tensor_of_one_number_is_a_number_whatever_its_shape():
    metrics = Metrics()
    metrics.add("train/loss", torch.tensor([[3.0]]))
    assert metrics["train/loss"] == 3.0


def test_a_tensor_of_several_numbers_is_refused_with_its_name_and_shape():
    with pytest.raises(BadStep, match=r"train/loss.* the shape \(2, 3\).*log its mean\(\) or sum\(\)\.$"):
        Metrics().add("train/loss", torch.ones(2, 3))


def test_a_new_epoch_keeps_the_old_mean_until_the_first_new_value():
    metrics = Metrics()
    metrics.add("train/loss", 1.0)
    metrics.begin("train")
    before = metrics["train/loss"]
    metrics.add("train/loss", 5.0)
    assert (before, metrics["train/loss"]) == (1.0, 5.0)


def test_a_new_epoch_of_one_stage_leaves_the_others():
    metrics = Metrics()
    for name in ("train/loss", "val/loss", "training/loss"):
        metrics.add(name, 1.0)
    metrics.begin("train")
    for name in ("train/loss", "val/loss", "training/loss"):
        metrics.add(name, 3.0)
    assert dict(metrics) == {"train/loss": 3.0, "val/loss": 2.0, "training/loss": 2.0}


def test_fresh_names_have_a_value_of_this_epoch():
    metrics = Metrics()
    metrics.add("train/loss", 1.0)
    metrics.add("train/accuracy", 1.0)
    metrics.add("val/loss", 1.0)
    metrics.begin("train")
    metrics.add("train/accuracy", 1.0)
    assert (metrics.fresh("train"), metrics.fresh("val")) == (["train/accuracy"], ["val/loss"])


def test_a_forgotten_stage_is_gone():
    metrics = Metrics({"sanity/loss": 1.0, "val/loss": 2.0})
    metrics.forget("sanity")
    assert dict(metrics) == {"val/loss": 2.0}


class Counts:
    """A metric object like those of torchmetrics."""

    def __init__(self, kind=torch.tensor):
        self.kind, self.right, self.all = kind, 0, 0

    def update(self, output, target):
        self.right += int((output == target).sum())
        self.all += len(target)

    def compute(self):
        return self.kind(self.right / self.all)

    def reset(self):
        self.right = self.all = 0


def counted(right, kind=torch.tensor):
    counts = Counts(kind)
    counts.update(torch.tensor([1] * right + [0] * (4 - right)), torch.ones(4))
    return counts


def test_an_object_with_compute_is_asked_when_it_is_read():
    metrics, counts = Metrics(), counted(2)
    metrics.add("val/accuracy", counts)
    before = metrics["val/accuracy"]
    counts.update(torch.ones(4), torch.ones(4))
    assert (before, metrics["val/accuracy"]) == (0.5, 0.75)


def test_an_object_with_compute_is_asked_for_good_when_its_epoch_is_over():
    metrics, counts = Metrics(), counted(2)
    metrics.add("val/accuracy", counts)
    metrics.finish("val")
    counts.reset()
    assert metrics["val/accuracy"] == 0.5


def test_an_object_of_another_stage_is_not_asked_at_the_end_of_one():
    metrics, counts = Metrics(), counted(2)
    metrics.add("test/accuracy", counts)
    metrics.finish("val")
    counts.update(torch.ones(4), torch.ones(4))
    assert metrics["test/accuracy"] == 0.75


@pytest.mark.parametrize("said", [torch.ones(3), {"a": 1.0}], ids=["three numbers", "a dict"])
def test_an_object_that_computes_several_numbers_is_an_error_that_names_it(said):
    metrics = Metrics()

    class Several:
        def compute(self):
            return said

    metrics.add("val/f1", Several())
    with pytest.raises((BadStep, TypeError, ValueError), match="val/f1"):
        metrics.finish("val")


def test_several_tensors_are_read_in_one_go():
    reads = []

    class Counting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func.__name__ in ("tolist", "item", "__float__"):
                reads.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    entries = {name: torch.tensor(float(i)).as_subclass(Counting) for i, name in enumerate("abcde")}
    said = numbers({**entries, "plain": 7})
    assert (said, len(reads)) == ({"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0, "e": 4.0, "plain": 7.0}, 1)


def test_numbers_keep_the_order_of_their_names():
    assert list(numbers({"b": 1, "a": torch.tensor(2.0), "c": counted(1)})) == ["b", "a", "c"]


def test_a_missing_metric_is_an_error_with_the_nearest_name_and_the_known_ones():
    with pytest.raises(MissingMetric) as caught:
        _ = Metrics({"val/loss": 1.0, "train/loss": 1.0})["val/los"]
    assert str(caught.value) == (
        "No metric 'val/los' has been logged. Did you mean 'val/loss'? Known: train/loss, val/loss."
    )


def test_a_missing_metric_is_a_key_error():
    with pytest.raises(KeyError):
        _ = Metrics()["val/loss"]


def test_when_nothing_is_known_the_sentence_says_so():
    assert missing("val/loss", {}) == "No metric 'val/loss' has been logged. Known: none yet."


def test_the_ratio_of_nothing_to_nothing_is_not_a_number():
    assert (ratio(6.0, 3), math.isnan(ratio(0.0, 0)), float(ratio(torch.tensor(6.0), 3))) == (2.0, True, 2.0)


@pytest.mark.parametrize("wrong", ["loss", "", 5, None])
def test_a_watched_name_has_a_stage(wrong):
    with pytest.raises(ValueError, match=r"is not the name of a metric; names have a stage, such as 'val/loss'\.$"):
        Watched(wrong)


def open_run(**given):
    run = Run(**given)
    run.metrics = Metrics()
    return run


def test_a_watched_metric_says_each_new_mean_once():
    run, watched, said = open_run(), Watched("val/loss"), []
    for value in (1.0, None, 2.0, 2.0):
        if value is not None:
            run.metrics.begin("val")
            run.metrics.add("val/loss", value)
        said.append(watched.new(run))
    assert said == [1.0, None, 2.0, 2.0]


@pytest.mark.parametrize("kind", [torch.tensor, float], ids=["tensor", "float"])
def test_a_watched_object_says_each_new_value_once(kind):
    run, watched, said = open_run(), Watched("val/accuracy"), []
    for right in (1, None, 2, 2):
        if right is not None:
            run.metrics.begin("val")
            run.metrics.add("val/accuracy", counted(right, kind))
            run.metrics.finish("val")
        said.append(watched.new(run))
    assert said == [0.25, None, 0.5, 0.5]


def test_a_watched_object_that_is_logged_in_training_is_new_in_every_epoch():
    said, watched, counts = [], Watched("train/accuracy"), Counts()
    run = Run()
    with loop.fit(run):
        for epoch in loop.epochs(run, 2):
            counts.reset()
            for _ in loop.batches(run, [0, 1]):
                counts.update(torch.full((4,), epoch), torch.ones(4))
                run.log({"accuracy": counts})
            said.append(watched.new(run))
    assert said == [0.0, 1.0]


def test_a_validation_metric_may_be_yet_to_come():
    assert Watched("val/loss").new(open_run()) is None


def test_a_metric_of_a_stage_that_has_others_is_missing():
    run = open_run()
    run.metrics.add("val/accuracy", 1.0)
    with pytest.raises(MissingMetric, match="No metric 'val/acuracy' has been logged"):
        Watched("val/acuracy").new(run)


def test_a_training_metric_that_was_not_logged_by_now_is_missing():
    with pytest.raises(MissingMetric, match="train/los"):
        Watched("train/los").new(open_run())


def test_a_validation_metric_of_a_task_that_is_never_evaluated_is_missing():
    with pytest.raises(MissingMetric, match="val/loss"):
        Watched("val/loss").new(open_run(task=object()))


def test_a_metric_of_a_prefix_of_ones_own_may_be_yet_to_come():
    assert Watched("probe/accuracy").new(open_run()) is None


def test_a_metric_that_never_came_is_an_error_at_the_end():
    run = open_run()
    run.progress.epochs = 1
    with pytest.raises(MissingMetric, match="val/loss"):
        Watched("val/loss").must_have_come(run)


def test_nothing_had_to_come_where_no_epoch_was_done():
    assert Watched("val/loss").must_have_come(open_run()) is None


def test_whole_numbers_read_beside_fractions_are_not_rounded():
    metrics = Metrics()
    metrics.add("train/tokens", torch.tensor(2**24 + 1))
    metrics.add("train/loss", torch.tensor(0.5))
    metrics.settle(["train/tokens", "train/loss"], {})
    assert dict(metrics) == {"train/tokens": 2.0**24 + 1, "train/loss": 0.5}
