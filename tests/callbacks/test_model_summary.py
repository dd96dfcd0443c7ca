import pytest
import torch
from torch import nn

from loopline import Run, loop
from loopline.callbacks import ModelSummary, summarize


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


def counts(summary):
    return [(row.path, row.parameters, row.note) for row in summary.rows]


def test_the_table_of_a_small_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)))
    model[0].requires_grad_(False)
    assert str(summarize(model)).splitlines() == [
        "module   type        parameters  trainable      MB",
        "(model)  Sequential          58        31%  0.0002",
        "  0      Linear              40         0%  0.0002",
        "  1      Sequential          18       100%  0.0001",
        "    0    ReLU                 0          -    0.00",
        "    1    Linear              18       100%  0.0001",
        "58 parameters, 18 trainable, 40 frozen; 0.0002 MB",
    ]


def test_where_nothing_is_frozen_no_column_says_so():
    assert str(summarize(nn.Linear(2, 2))).splitlines() == [
        "module   type    parameters      MB",
        "(model)  Linear           6  0.0000",
        "6 parameters, all trainable; 0.0000 MB",
    ]


def test_depth_says_how_far_down_the_table_goes():
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(1, 1))))
    assert [[row.path for row in summarize(model, depth).rows] for depth in (0, 1, 3)] == [
        [""],
        ["", "0"],
        ["", "0", "0.0", "0.0.0"],
    ]


def test_a_shared_parameter_is_counted_once_and_said():
    assert counts(summarize(Tied())) == [
        ("", 78, ""),
        ("embed", 40, ""),
        ("body", 28, ""),
        ("body.0", 20, ""),
        ("body.1", 8, ""),
        ("head", 10, "shares 40 with embed"),
    ]


def test_a_module_in_two_places_is_counted_once_and_said():
    layer = nn.Linear(2, 2)
    assert counts(summarize(nn.Sequential(layer, layer))) == [
        ("", 6, ""),
        ("0", 6, ""),
        ("1", 0, "the same module as 0"),
    ]


def test_buffers_are_told_apart_and_take_room():
    summary = summarize(Tied())
    assert (summary.parameters, summary.buffers, summary.bytes) == (78, 9, 4 * 78 + 4 * 8 + 8)


def test_parameters_that_are_not_there_yet_are_said():
    summary = summarize(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)), example=torch.zeros(1, 2))
    assert (counts(summary), [row.shape for row in summary.rows], summary.notes[0]) == (
        [("", 4, "2 not initialised yet"), ("0", 0, "2 not initialised yet"), ("1", 4, "")],
        [None, None, None],
        "No shapes: a forward pass would initialise the lazy parameters.",
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_model_is_seen_as_it_was_written():
    inner = nn.Linear(2, 2)
    model = torch.compile(nn.Sequential(torch.compile(inner), nn.ReLU()))
    summary = summarize(model, example=torch.zeros(1, 2))
    assert [(row.path, row.type, row.shape) for row in summary.rows] == [
        ("", "Sequential", "1 x 2"),
        ("0", "Linear", "1 x 2"),
        ("1", "ReLU", "1 x 2"),
    ]


@pytest.mark.parametrize(
    "example",
    [torch.zeros(3, dtype=torch.long), (torch.zeros(3, dtype=torch.long),), {"x": torch.zeros(3, dtype=torch.long)}],
)
def test_an_example_adds_the_shapes_of_outputs(example):
    shapes = {row.path: row.shape for row in summarize(Tied(), example=example).rows}
    assert (shapes["embed"], shapes["head"], shapes[""]) == ("3 x 4", "3 x 10", "3 x 10")


def test_several_outputs_are_shown_each():
    assert (
        summarize(nn.LSTM(2, 3), example=torch.zeros(4, 1, 2)).rows[0].shape
        == "(4 x 1 x 3), ((1 x 1 x 3), (1 x 1 x 3))"
    )


def test_looking_with_an_example_leaves_no_trace():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2))
    model[0].eval()
    torch.manual_seed(0)

    class Draws(nn.Module):
        def forward(self, x):
            return x + torch.rand(2)

    model.append(Draws())
    before = (
        torch.get_rng_state(),
        [m.training for m in model.modules()],
        {k: v.clone() for k, v in model.state_dict().items()},
    )
    summarize(model, example=torch.ones(4, 2))
    after = torch.get_rng_state(), [m.training for m in model.modules()], model.state_dict()
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert all(torch.equal(before[2][name], after[2][name]) for name in before[2])
    assert not any(module._forward_hooks for module in model.modules())


def test_an_example_that_does_not_fit_leaves_no_trace_either():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        summarize(model, example=torch.ones(1, 3))
    assert ([m.training for m in model.modules()], dict(model[0]._forward_hooks)) == ([True, True], {})


def test_a_fit_begins_with_the_table():
    lines = []
    run = Run(model=nn.Linear(1, 1), callbacks=[ModelSummary(write=lines.append)])
    with loop.fit(run):
        pass
    assert lines == [f"{summarize(run.model)}\n"]


def test_an_example_that_does_not_fit_does_not_end_the_run(caplog):
    run = Run(model=nn.Linear(1, 1), callbacks=[ModelSummary(example=torch.zeros(1, 2))])
    with loop.fit(run):
        pass
    assert (run.status, "ModelSummary failed at fit_start" in caplog.text) == ("completed", True)


@pytest.mark.parametrize("depth", [-1, 1.5, True])
def test_a_depth_that_is_none_is_refused(depth):
    with pytest.raises(ValueError, match="give a whole number, 0 or more"):
        ModelSummary(depth)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="give a torch module"):
        summarize("model")
