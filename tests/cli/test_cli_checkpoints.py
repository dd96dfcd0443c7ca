import dataclasses
import fcntl
import json
import os
import pty
import re
import shutil
import stat
import struct
import subprocess
import sys
import termios
import textwrap

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from loopline import Every, SupervisedTask, Trainer
from loopline.checkpoint import All, Best, Checkpointer, Dcp
from loopline.checkpoint.identity import identify
from loopline.checkpoint.manifest import MANIFEST, Manifest
from loopline.checkpoint.owner import Owner
from loopline.checkpoint.shelf import Shelf
from loopline.cli import main
from loopline.stores import LocalStore
from loopline.testing import tiny_loader

FULL = os.environ.get("LOOPLINE_FULL") == "1"


class Tied(nn.Module):
    """Two layers with one weight, and something beside the tensors."""

    def __init__(self):
        super().__init__()
        source = torch.Generator().manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight = self.first.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=source)

    def forward(self, x):
        return self.head(self.second(self.first(x)))

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        pass


def trained(folder, *, epochs=3, resume="auto", **given):
    model = Tied()
    given = {"when": Every(epochs=1), "keep": All() | Best(1, "val/loss", mode="max"), **given}
    task = SupervisedTask(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam(model.parameters(), lr=0.1))
    trainer = Trainer(task, checkpoint=Checkpointer(folder, asynchronous=False, **given), seed=1, progress=False)
    trainer.fit(tiny_loader(2), tiny_loader(2, seed=1), epochs=epochs, resume=resume)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with three checkpoints, at steps 2, 4 and 6, and its model at the end."""
    folder = tmp_path_factory.mktemp("runs") / "made"
    return folder, trained(folder)


@pytest.fixture
def run_folder(made, tmp_path):
    """A copy of that run, to be spoilt."""
    return shutil.copytree(made[0], tmp_path / "run")


def path_of(folder, step):
    (found,) = (folder / "checkpoints").glob(f"{step:012d}-*")
    return found


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def with_manifest(folder, step, **changes):
    """Another manifest in the place of a checkpoint's, signed as they are."""
    path = path_of(folder, step) / MANIFEST
    manifest = Manifest.from_bytes(path.read_bytes(), path.parent.name)
    path.write_bytes(dataclasses.replace(manifest, **changes).to_bytes())


def told(capsys, *command):
    """What a command says as JSON, and its exit code."""
    code = main(["checkpoints", *map(str, command), "--json"])
    return code, json.loads(capsys.readouterr().out)


def states(said):
    return {one["step"]: one["state"] for one in said["checkpoints"]}


def test_a_run_is_listed_with_its_newest_and_best(run_folder, capsys):
    code, said = told(capsys, run_folder)
    shown = [(one["step"], one["epochs"], one["samples"], one["state"], one["newest"]) for one in said["checkpoints"]]
    values = [one["metrics"]["val/loss"] for one in said["checkpoints"]]
    assert (code, shown, [one["pins"] for one in said["checkpoints"]]) == (
        0,
        [(2, 1, 4, "committed", False), (4, 2, 8, "committed", False), (6, 3, 12, "committed", True)],
        [["best"] if value == max(values) else [] for value in values],
    )


def test_in_a_pipe_each_checkpoint_is_one_line_without_control_codes(run_folder, capsys):
    code = main(["checkpoints", str(run_folder)])
    head, columns, *rows = capsys.readouterr().out.splitlines()
    names = [path_of(run_folder, step).name for step in (2, 4, 6)]
    assert (code, head, columns.split()[0], [row[2:23] for row in rows], rows[-1][0], "\x1b" in "".join(rows)) == (
        0,
        f"{run_folder}: 3 committed (not verified)",
        "checkpoint",
        names,
        "*",
        False,
    )


def test_every_state_that_a_checkpoint_can_be_in_is_told(run_folder, capsys):
    trained(run_folder, epochs=5, resume="never", when=Every(epochs=2))  # of the new run: steps 4, 8 and 10
    (run_folder / "quarantine").mkdir()
    path_of(run_folder, 2).rename(run_folder / "quarantine" / f"{path_of(run_folder, 2).name}.0123abcd")
    flip(path_of(run_folder, 8) / MANIFEST)
    begun = run_folder / "checkpoints" / "000000000012-0123abcd" / "tensors"
    begun.mkdir(parents=True)
    (begun / "model.safetensors").write_bytes(b"half")
    with_manifest(run_folder, 6, format=(99, 0))
    code, said = told(capsys, run_folder)
    assert (code, [(one["step"], one["state"], one["newest"]) for one in said["checkpoints"]]) == (
        0,
        [
            (4, "of another run", False),
            (2, "set aside", False),
            (4, "committed", False),
            (6, "of a newer format", False),
            (8, "damaged", False),
            (10, "committed", True),
            (12, "unfinished", False),
        ],
    )


def test_a_flipped_bit_is_found_if_asked_for(run_folder, capsys):
    flip(path_of(run_folder, 6) / "tensors" / "model.safetensors")
    (seen, listed), (code, verified) = told(capsys, run_folder), told(capsys, run_folder, "--verify")
    assert (seen, states(listed)[6], code, states(verified), verified["checkpoints"][1]["newest"]) == (
        0,
        "committed",
        1,
        {2: "committed", 4: "committed", 6: "damaged"},
        True,
    )


@pytest.mark.parametrize("file", ["global.json", "rank-00000.safetensors", "tensors/optimizer-0.safetensors"])
@pytest.mark.parametrize("spoil", [flip, os.remove, lambda path: os.truncate(path, 5)], ids=["flip", "remove", "cut"])
def test_any_file_that_is_not_as_it_was_is_damage(run_folder, capsys, file, spoil):
    spoil(path_of(run_folder, 4) / file)
    code, said = told(capsys, run_folder, "--verify")
    assert (code, states(said)[4], file in said["checkpoints"][1]["why"]) == (1, "damaged", True)


def test_a_run_that_is_intact_is_told_so_with_0(run_folder, capsys):
    code = main(["checkpoints", str(run_folder), "--verify"])
    assert (code, capsys.readouterr().out.splitlines()[0]) == (0, f"{run_folder}: 3 intact")


def test_where_none_is_intact_the_code_is_74(run_folder, capsys):
    for step in (2, 4, 6):
        flip(path_of(run_folder, step) / "global.json")
    assert told(capsys, run_folder, "--verify")[0] == 74


def test_where_all_were_set_aside_the_code_is_74(run_folder, capsys):
    (run_folder / "checkpoints").rename(run_folder / "quarantine")
    assert told(capsys, run_folder, "--verify")[0] == 74


def test_where_none_was_ever_finished_the_code_is_1(run_folder, capsys):
    for step in (2, 4, 6):
        (path_of(run_folder, step) / MANIFEST).unlink()
    code, said = told(capsys, run_folder, "--verify")
    assert (code, set(states(said).values())) == (1, {"unfinished"})


def test_without_its_run_file_a_folder_is_listed_all_the_same(run_folder, capsys):
    (run_folder / "run.json").unlink()
    assert states(told(capsys, run_folder)[1]) == {2: "committed", 4: "committed", 6: "committed"}


def test_a_folder_by_url_is_listed_as_by_path(run_folder, capsys):
    assert told(capsys, run_folder.as_uri())[1]["checkpoints"] == told(capsys, run_folder)[1]["checkpoints"]


@pytest.mark.parametrize("said", ["name", "6", "latest", "end"])
def test_one_is_shown_by_its_name_step_or_pin(run_folder, capsys, said):
    name = path_of(run_folder, 6).name
    Checkpointer(run_folder).pin("end", Shelf(LocalStore(run_folder)).get(name).manifest.ref())
    code, shown = told(capsys, run_folder, "--show", name if said == "name" else said)
    assert (code, shown["name"], shown["damage"], shown["sections"]["model"]) == (
        0,
        name,
        None,
        {
            "first.weight": {"dtype": "F32", "shape": [4, 4]},
            "first.bias": {"dtype": "F32", "shape": [4]},
            "second.bias": {"dtype": "F32", "shape": [4]},
            "head.weight": {"dtype": "F32", "shape": [2, 4]},
            "head.bias": {"dtype": "F32", "shape": [2]},
        },
    )


def test_what_is_shown_can_be_read(run_folder, capsys):
    code = main(["checkpoints", str(run_folder), "--show", "6", "--verify"])
    out = capsys.readouterr().out
    wanted = [
        r"progress +step 6, 3 epochs, 12 samples",
        r"parent 000000000004-",
        r"tensors/model\.safetensors +\d+ B  [0-9a-f]{32}",
        r"\n  model  \d tensors, [\d.]+ k?B\n",
        r"\n    head\.weight +float32 \[2, 4\]\n",
        r"\n  progress  no tensors\n",
        r"\nintact: every file was read and compared\n$",
    ]
    assert (code, [pattern for pattern in wanted if not re.search(pattern, out)]) == (0, [])


def test_one_whose_files_are_damaged_is_shown_as_far_as_it_goes(run_folder, capsys):
    flip(path_of(run_folder, 6) / "global.json")
    code, shown = told(capsys, run_folder, "--show", "6")
    assert (code, shown["step"], shown["sections"], "global.json was altered" in shown["damage"]) == (1, 6, {}, True)


def test_pieces_of_tensors_are_shown_whole(tmp_path, capsys):
    trained(tmp_path, epochs=1, codec=Dcp())
    sections = told(capsys, tmp_path, "--show", "latest")[1]["sections"]
    assert (sections["model"]["first.weight"], sections["optimizer/0"]["state/0/exp_avg"]) == (
        {"dtype": "F32", "shape": [4, 4]},
        {"dtype": "F32", "shape": [4, 4]},
    )


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["--show", "7"], "There is no checkpoint of step 7 in {run}; the last steps are 2, 4, 6."),
        (["--show", "000000000006-00000000"], "There is no checkpoint 000000000006-00000000 in {run}."),
        (
            ["--export", "{out}", "--from", "wrost"],
            "There is no checkpoint 'wrost' in {run}. Give a name such as 000000001500-7f3a9c2e, a step, or one of: "
            "latest, best.",
        ),
        (["--export", "{out}.pt"], "{out}.pt is to be a safetensors file; give a name that ends with .safetensors."),
        (["--export", "{run}/no/w.safetensors"], "There is no folder {run}/no to write w.safetensors into."),
    ],
)
def test_what_is_not_there_is_one_clear_sentence(run_folder, tmp_path, capsys, command, sentence):
    places = {"run": run_folder, "out": tmp_path / "w.safetensors"}
    code = main(["checkpoints", str(run_folder), *(word.format(**places) for word in command)])
    assert (code, capsys.readouterr()) == (1, ("", f"loopline checkpoints: {sentence.format(**places)}\n"))


def test_a_folder_without_checkpoints_is_one_clear_sentence(run_folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    codes = [main(["checkpoints", str(path)]) for path in (tmp_path / "no", tmp_path / "file", tmp_path / "empty")]
    codes.append(main(["checkpoints", str(run_folder / "checkpoints")]))
    assert (codes, capsys.readouterr().err.splitlines()) == (
        [1, 1, 1, 1],
        [
            f"loopline checkpoints: There is no folder {tmp_path / 'no'}.",
            f"loopline checkpoints: LocalStore('{tmp_path / 'file'}'): that is a file; give a folder.",
            f"loopline checkpoints: There are no checkpoints in {tmp_path / 'empty'}.",
            f"loopline checkpoints: There are no checkpoints in {run_folder / 'checkpoints'}. "
            f"Give the run's own folder: {run_folder}",
        ],
    )


@pytest.mark.parametrize(
    "command",
    [["--from", "best"], ["--force"], ["--show", "1", "--export", "w.safetensors"], ["--verify", "--export", "w"]],
)
def test_options_that_do_not_go_together_are_a_wrong_command_line(run_folder, capsys, command):
    with pytest.raises(SystemExit) as left:
        main(["checkpoints", str(run_folder), *command])
    assert left.value.code == 2


def test_exported_weights_load_into_the_model_that_was_trained(made, tmp_path, capsys):
    folder, model = made
    code, said = told(capsys, folder, "--export", tmp_path / "w.safetensors")
    weights, then = load_file(tmp_path / "w.safetensors"), model.state_dict()
    then.pop("_extra_state")
    assert (code, list(weights), said["left_out"], [n for n in then if not torch.equal(weights[n], then[n])]) == (
        0,
        sorted(then),
        {"_extra_state": "dict, no tensor"},
        [],
    )


def test_an_exported_file_says_where_it_is_from_and_is_its_owners_alone(run_folder, tmp_path, capsys):
    umask = os.umask(0)
    try:
        told(capsys, run_folder, "--export", tmp_path / "w.safetensors", "--from", "4")
    finally:
        os.umask(umask)
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        about = file.metadata()
    mode = stat.S_IMODE((tmp_path / "w.safetensors").stat().st_mode)
    known = {"checkpoint": path_of(run_folder, 4).name, "steps": "4", "epochs": "2", "samples": "8", "format": "pt"}
    assert (about.pop("run") != "", about, oct(mode)) == (True, known, "0o600")


def test_a_file_that_is_there_is_replaced_only_by_force(run_folder, tmp_path, capsys):
    target = tmp_path / "w.safetensors"
    target.write_text("mine")
    command = ["checkpoints", str(run_folder), "--export", str(target)]
    first, kept, second = main(command), target.read_text(), main([*command, "--force"])
    assert (first, kept, second, len(load_file(target)), sorted(path.name for path in tmp_path.iterdir())) == (
        1,
        "mine",
        0,
        6,
        ["run", "w.safetensors"],
    )


def test_the_best_is_exported_by_its_pin(run_folder, tmp_path, capsys):
    best = json.loads((run_folder / "pins" / "best.json").read_text())["checkpoint"]
    assert told(capsys, run_folder, "--export", tmp_path / "w.safetensors", "--from", "best")[1]["checkpoint"] == best


def test_damaged_weights_are_not_exported(run_folder, tmp_path, capsys):
    flip(path_of(run_folder, 6) / "tensors" / "model.safetensors")
    code = main(["checkpoints", str(run_folder), "--export", str(tmp_path / "w.safetensors"), "--from", "6"])
    assert (code, "was altered" in capsys.readouterr().err, list(tmp_path.glob("*w.*"))) == (1, True, [])


def test_the_latest_that_is_exported_is_the_newest_intact(run_folder, tmp_path, capsys, caplog):
    flip(path_of(run_folder, 6) / "tensors" / "model.safetensors")
    code, said = told(capsys, run_folder, "--export", tmp_path / "w.safetensors")
    assert (code, said["checkpoint"], len(caplog.records)) == (0, path_of(run_folder, 4).name, 1)


def test_where_none_is_intact_the_latest_is_not_exported_and_the_code_is_74(run_folder, tmp_path, capsys):
    for step in (2, 4, 6):
        flip(path_of(run_folder, step) / "tensors" / "model.safetensors")
    code = main(["checkpoints", str(run_folder), "--export", str(tmp_path / "w.safetensors")])
    assert (code, "None of the 3 checkpoints" in capsys.readouterr().err) == (74, True)


def test_a_checkpoint_of_a_newer_format_is_neither_passed_over_nor_exported(run_folder, tmp_path, capsys):
    with_manifest(run_folder, 6, format=(99, 0))
    code = main(["checkpoints", str(run_folder), "--export", str(tmp_path / "w.safetensors")])
    assert (code, "has the format 99.0" in capsys.readouterr().err) == (1, True)


def snapshot(folder):
    return {path: (path.lstat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


@pytest.mark.parametrize("spoilt", [False, True], ids=["as it is", "without run file, damaged"])
def test_looking_writes_nothing_into_the_run(run_folder, tmp_path, capsys, spoilt):
    if spoilt:
        (run_folder / "run.json").unlink()
        flip(path_of(run_folder, 6) / "tensors" / "model.safetensors")
    before = snapshot(run_folder)
    for number, command in enumerate([[], ["--verify"], ["--show", "latest", "--verify"], ["--export"]]):
        command += [str(tmp_path / f"{number}.safetensors")] * (command == ["--export"])
        main(["checkpoints", str(run_folder), *command])
    assert snapshot(run_folder) == before


def test_what_writes_into_the_run_would_be_seen(run_folder):
    (run_folder / "run.json").unlink()
    before = snapshot(run_folder)
    identify(Shelf(LocalStore(run_folder)))
    assert snapshot(run_folder) != before


def test_looking_needs_no_lock(run_folder, capsys):
    owner = Owner.take(LocalStore(run_folder))
    try:
        assert told(capsys, run_folder, "--verify")[0] == 0
    finally:
        owner.release()


TRAINING = """
    import sys
    import torch
    from torch import nn
    from loopline import Every, SupervisedTask, Trainer
    from loopline.checkpoint import Checkpointer, Latest
    from loopline.testing import tiny_loader

    model = nn.Linear(4, 2)
    task = SupervisedTask(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    saving = Checkpointer(sys.argv[1], when=Every(steps=1), keep=Latest(1))
    Trainer(task, checkpoint=saving, seed=1, progress=False).fit(tiny_loader(100), epochs=100_000)
"""


def test_a_run_may_save_and_remove_checkpoints_meanwhile(tmp_path, capsys):
    folder = tmp_path / "run"
    training = subprocess.Popen([sys.executable, "-c", textwrap.dedent(TRAINING), str(folder)])
    try:
        while not list(folder.glob("checkpoints/*/MANIFEST.json")):
            assert training.poll() is None
        seen, codes = {}, set()
        while len(seen) < (80 if FULL else 8):
            assert training.poll() is None
            code, said = told(capsys, folder, "--verify")
            target = tmp_path / f"{len(codes)}.safetensors"
            codes |= {code, told(capsys, folder, "--export", target, "--force")[0]}
            seen |= {one["name"]: one["state"] for one in said["checkpoints"] if one["state"] != "unfinished"}
    finally:
        training.kill()
        training.wait()
    assert (codes, set(seen.values())) == ({0}, {"committed"})


@pytest.mark.parametrize("command", [[], ["--show", "6"]])
def test_text_in_a_manifest_cannot_move_the_cursor(run_folder, capsys, command):
    hostile = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e[red]text[/red]"
    with_manifest(run_folder, 6, reason=hostile, created=hostile, versions={hostile: hostile}, metrics={hostile: 1.0})
    main(["checkpoints", str(run_folder), *command])
    out = capsys.readouterr().out
    assert ([letter for letter in out if not letter.isprintable() and letter != "\n"], "[red]text[/red]" in out) == (
        [],
        True,
    )


def test_a_metric_that_is_infinite_is_still_json(run_folder, capsys):
    with_manifest(run_folder, 6, metrics={"val/loss": float("inf")})
    said = json.loads(json.dumps(told(capsys, run_folder)[1]), parse_constant=pytest.fail)
    assert said["checkpoints"][-1]["metrics"] == {"val/loss": "inf"}


def on_a_terminal(columns, *command):
    """What a command writes on a terminal that is so wide."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "NO_COLOR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "loopline", "checkpoints", *command]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        out = b""
        try:
            while piece := os.read(master, 65536):
                out += piece
        except OSError:
            pass  # the other side is closed
        finally:
            os.close(master)
    assert process.returncode == 0
    return out.decode().splitlines()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_on_a_terminal_no_line_is_too_long_and_no_metric_is_torn(run_folder, columns):
    with_manifest(run_folder, 6, metrics={f"val/metric_{i}": float(i) for i in range(9)})
    lines = on_a_terminal(columns, str(run_folder))
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines]
    metrics = re.findall(r"val/metric_\d \d", "\n".join(plain))
    assert (max(map(len, plain)) <= columns, plain != lines, len(metrics), "and 3 more" in "\n".join(plain)) == (
        True,
        True,
        6,
        True,
    )
