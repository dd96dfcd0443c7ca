"""Checkpoints that released versions wrote, and what is done with those of versions to come.

`pytest --regold` writes one of the present format where there is none yet; those of earlier formats are never written
again.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loopline import Every, SupervisedTask, Trainer, on
from loopline.callbacks import EarlyStopping
from loopline.checkpoint import Checkpointer, Latest, export_weights, list_checkpoints
from loopline.checkpoint.manifest import FORMAT, MANIFEST, Manifest
from loopline.core.errors import Damaged, NewerFormat
from loopline.core.event import BATCH_END, STEP_END
from loopline.core.run import Scheduled
from loopline.stores import LocalStore

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
FORMATS = sorted(path.name for path in GOLDEN.iterdir())
PRESENT = f"{FORMAT[0]}.{FORMAT[1]}"
CUT = 7


def trained(folder, *, cut=None):
    """The losses of every batch, and the model: what the golden checkpoints were cut from, so it must stay as it is."""
    source = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.25), nn.Linear(6, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=source)
    x = torch.randn(20, 4, generator=source)
    y = (x.sum(dim=1) > 0).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = Scheduled(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5), when=Every(steps=1))
    losses = []

    @on(BATCH_END)
    def note(run):
        losses.append(run.batch.loss.item())

    @on(STEP_END)
    def stop(run):
        if run.step + 1 == cut:
            run.stop("cut")

    Trainer(
        SupervisedTask(model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, scheduler=scheduler),
        callbacks=[EarlyStopping("val/loss", patience=50), note, stop],
        checkpoint=Checkpointer(folder, when=Every(epochs=1), keep=Latest(1), asynchronous=False),
        progress=False,
        seed=11,
    ).fit(DataLoader(TensorDataset(x, y), 4, shuffle=True), [(x[:8], y[:8])], epochs=3)
    return losses, model


@pytest.fixture(scope="module", autouse=True)
def _written(pytestconfig, tmp_path_factory):
    """With --regold, a golden checkpoint of the present format, if there is none."""
    target = GOLDEN / PRESENT
    if not pytestconfig.getoption("--regold") or target.exists():
        return
    folder = tmp_path_factory.mktemp("golden")
    _, model = trained(folder, cut=CUT)
    losses, end = trained(tmp_path_factory.mktemp("whole"))
    for name in ("run.json", "checkpoints"):
        copy = shutil.copytree if (folder / name).is_dir() else shutil.copy
        target.joinpath("run").mkdir(parents=True, exist_ok=True)
        copy(folder / name, target / "run" / name)
    said = {
        "torch": torch.__version__,
        "losses": [loss.hex() for loss in losses],
        "weights": digest(model.state_dict()),
        "weights at the end": digest(end.state_dict()),
    }
    (target / "expected.json").write_text(json.dumps(said, indent=2) + "\n")


@pytest.fixture(params=FORMATS)
def old(request, tmp_path):
    """A copy of a run's folder that a released version left, and what that version found."""
    folder = shutil.copytree(GOLDEN / request.param / "run", tmp_path / "run")
    return folder, json.loads((GOLDEN / request.param / "expected.json").read_text())


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The same training, uncut, on this machine: another one, or another torch, rounds otherwise."""
    losses, model = trained(tmp_path_factory.mktemp("here"))
    return losses, digest(model.state_dict())


def digest(tensors):
    """A hash over names and values."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def goes_on_as_then(folder, expected, here):
    """Whether it does: to the bit where this machine counts as that one did, else as near as can be asked."""
    losses, model = trained(folder)
    then = [float.fromhex(loss) for loss in expected["losses"]]
    if here == (then, expected["weights at the end"]):
        return (losses, digest(model.state_dict())) == (then[CUT:], expected["weights at the end"])
    return losses == pytest.approx(then[CUT:], rel=1e-4)


def rewritten(folder, *, manifest=None, shared=None, weight=None):
    """Change what a checkpoint says, and sign it anew, as another version would have written it."""
    (path,) = (folder / "checkpoints").glob(f"*/{MANIFEST}")
    body = json.loads(path.read_bytes())
    if shared is not None:
        text = json.dumps({**json.loads((path.parent / "global.json").read_bytes()), **shared(path)})
        (path.parent / "global.json").write_text(text)
    if weight is not None:
        file = path.parent / "tensors" / "model.safetensors"
        weights = load_file(file)
        weights["0.weight"][0, 0] += weight
        save_file(weights, file)
    for name in body["files"]:
        data = (path.parent / name).read_bytes()
        body["files"][name] = {"size": len(data), "hash": xxhash.xxh3_128(data).hexdigest()}
    body |= manifest or {}
    del body["self"]
    path.write_bytes(signed(body))


def signed(body):
    """A manifest with its own hash."""
    said = json.dumps({key: body[key] for key in sorted(body)}, separators=(",", ":")).encode()
    return json.dumps({**body, "self": hashlib.sha256(said).hexdigest()}, separators=(",", ":")).encode()


def test_there_is_a_golden_checkpoint_of_the_present_format():
    assert (GOLDEN / PRESENT / "expected.json").exists(), "write it: pytest --regold tests/checkpoint"


def test_a_run_that_a_released_version_left_goes_on_as_it_did_then(old, here):
    folder, expected = old
    assert goes_on_as_then(folder, expected, here)


def test_one_weight_that_differs_by_little_would_show(old, here):
    folder, expected = old
    rewritten(folder, weight=0.01)
    assert not goes_on_as_then(folder, expected, here)


def test_the_weights_that_a_released_version_kept_have_the_same_values(old, tmp_path):
    folder, expected = old
    written = export_weights(folder, "latest", tmp_path / "weights.safetensors")
    assert digest(load_file(written.path)) == expected["weights"]


def test_every_file_that_a_released_version_wrote_is_intact(old):
    folder, _ = old
    assert [(one.state, one.step) for one in list_checkpoints(LocalStore(folder), verify=True)] == [("committed", CUT)]


def test_a_checkpoint_says_who_wrote_it(old, request):
    folder, expected = old
    (listed,) = list_checkpoints(LocalStore(folder))
    assert (listed.manifest.versions["torch"], f"{listed.manifest.format[0]}") == (
        expected["torch"],
        request.node.callspec.params["old"].split(".")[0],
    )


def test_a_newer_major_is_refused_with_the_version_that_wrote_it(old):
    folder, _ = old
    rewritten(folder, manifest={"format": [FORMAT[0] + 1, 0], "versions": {"loopline": "9.1.0"}})
    with pytest.raises(NewerFormat, match=rf"format {FORMAT[0] + 1}\.0, written by loopline \W?9\.1\.0"):
        trained(folder)


def test_a_newer_major_stays_where_it_is(old):
    folder, _ = old
    rewritten(folder, manifest={"format": [FORMAT[0] + 1, 0]})
    before = sorted(folder.glob("checkpoints/*/*"))
    with pytest.raises(NewerFormat):
        trained(folder)
    assert sorted(folder.glob("checkpoints/*/*")) == before


def test_a_newer_major_is_told_even_if_nothing_else_in_it_is_known():
    with pytest.raises(NewerFormat, match="a later version"):
        Manifest.from_bytes(signed({"format": [99, 3], "everything": "else"}), "000000000001-00000000")


def test_a_newer_minor_with_keys_that_nobody_knows_yet_goes_on(old, here):
    folder, expected = old
    rewritten(
        folder,
        manifest={"format": [FORMAT[0], FORMAT[1] + 7], "mesh": [2, 2], "signature": None},
        shared=lambda path: {"compression": "none"},
    )
    assert goes_on_as_then(folder, expected, here)


def test_keys_that_nobody_knows_are_signed_too(old):
    folder, _ = old
    rewritten(folder, manifest={"mesh": [2, 2]})
    (path,) = (folder / "checkpoints").glob(f"*/{MANIFEST}")
    altered = path.read_bytes().replace(b'"mesh":[2,2]', b'"mesh":[4,1]')
    with pytest.raises(Damaged, match="was altered"):
        Manifest.from_bytes(altered, path.parent.name)


def test_golden_checkpoints_are_small_and_hold_nothing_of_who_wrote_them():
    files = [path for path in GOLDEN.rglob("*") if path.is_file()]
    known = {"run.json", "expected.json", MANIFEST, "global.json", "rank-00000.json"}
    others = {path.name for path in files if path.suffix != ".safetensors"} - known
    sizes = {name: sum(p.stat().st_size for p in (GOLDEN / name).rglob("*") if p.is_file()) for name in FORMATS}
    assert (others, [name for name, size in sizes.items() if size > 100_000]) == (set(), [])
