"""One device: choosing it, and moving the parts there."""

import pytest
import torch
from torch import nn

from loopline import Single
from loopline.core.comm import ALONE
from loopline.strategies import Parts, Strategy, Traits, strategy_of

META = torch.device("meta")


@pytest.fixture
def moved_like_cuda():
    """Parameters stay the same objects when a model moves to the meta device, as they do when it moves to cuda."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def a_trained_pair():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_auto_takes_the_cpu_where_there_is_nothing_faster():
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has something faster")
    assert Single().device == Single("auto").device == torch.device("cpu")


@pytest.mark.parametrize("given", ["auto", "single"])
def test_a_strategy_may_be_given_by_name(given):
    assert isinstance(strategy_of(given), Single)


@pytest.mark.parametrize("given", ["cpu", torch.device("cpu")])
def test_a_strategy_may_be_given_as_a_device(given):
    assert strategy_of(given).device == torch.device("cpu")


def test_a_strategy_that_is_one_already_is_taken_as_it_is():
    single = Single("cpu")
    assert strategy_of(single) is single


@pytest.mark.parametrize("wrong", [5, None, object()])
def test_what_is_no_strategy_is_refused_at_once(wrong):
    with pytest.raises((TypeError, ValueError), match="strategy"):
        strategy_of(wrong)


def test_a_wrong_device_is_an_error_that_lists_the_right_words():
    with pytest.raises(ValueError, match=r"device") as caught:
        Single("gpu")
    assert str(caught.value) == (
        "'gpu' is neither a strategy (auto, single) nor a device (auto, cpu, cuda, cuda:1, mps)."
    )


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has cuda")
def test_a_device_that_is_not_here_is_an_error_that_names_what_is(device):
    with pytest.raises(ValueError, match="asked for") as caught:
        Single(device)
    assert str(caught.value) == (
        f"The device '{device}' was asked for, but torch finds none here; use 'auto' or 'cpu'."
    )


def test_single_is_alone_and_shards_nothing():
    single = Single("cpu")
    assert (single.comm, single.traits, single.close()) == (ALONE, Traits(False, False), None)


def test_single_has_everything_that_a_strategy_has():
    asked = [name for name in vars(Strategy) if not name.startswith("_")]
    assert [name for name in asked if not hasattr(Single("cpu"), name)] == []


def test_the_model_and_its_optimizers_state_move_to_the_device(moved_like_cuda):
    model, optimizer = a_trained_pair()
    parts = Single(META).place(Parts(model, [optimizer]))
    state = [v.device for s in optimizer.state.values() for name, v in s.items() if name != "step"]
    assert ({p.device for p in parts.model.parameters()}, set(state)) == ({META}, {META})


def test_an_optimizer_still_holds_the_parameters_of_the_model_that_moved(moved_like_cuda):
    model, optimizer = a_trained_pair()
    parts = Single(META).place(Parts(model, [optimizer]))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in parts.model.parameters()]


def test_what_is_in_place_is_left_in_place():
    model, optimizer = a_trained_pair()
    before = [v for s in optimizer.state.values() for v in s.values()]
    Single("cpu").place(Parts(model, [optimizer]))
    after = [v for s in optimizer.state.values() for v in s.values()]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_clipping_gives_the_norm_that_the_gradients_had():
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    norm = Single("cpu").clip(Parts(model), 1.0)
    assert (float(norm), model.weight.grad.norm().item()) == (5.0, pytest.approx(1.0, abs=1e-5))


def test_an_unfinished_window_asks_for_nothing():
    with Single("cpu").unfinished_window(Parts(nn.Linear(1, 1))) as said:
        assert said is None


def test_state_goes_out_and_comes_back():
    model, optimizer = a_trained_pair()
    other, its_optimizer = a_trained_pair()
    single = Single("cpu")
    single.load_state(Parts(other, [its_optimizer]), single.state(Parts(model, [optimizer])))
    one, two = single.state(Parts(model, [optimizer])), single.state(Parts(other, [its_optimizer]))
    assert sorted(one) == ["model", "optimizer/0"]
    torch.testing.assert_close(two, one, rtol=0, atol=0)
