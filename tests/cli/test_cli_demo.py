import csv
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import loopline
from loopline.cli import main
from loopline.cli.demo import validate

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A demo that ran to its end: its folder, exit code and output."""
    folder = tmp_path_factory.mktemp("runs") / "the demo"
    done = subprocess.run(
        [sys.executable, "-m", "loopline", "demo", "--epochs", "6", "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return folder, done


def test_it_learns_the_digits_and_leaves_its_results(trained):
    folder, done = trained
    reached = float(re.search(r"Validation accuracy ([\d.]+)%", done.stdout)[1])
    files = sorted(path.name for path in folder.iterdir())
    assert (done.returncode, done.stderr, reached > 95, files) == (
        0,
        "",
        True,
        ["best.safetensors", "last.safetensors", "metrics.csv", "metrics.jsonl"],
    )


def test_the_best_weights_measure_as_it_says(trained):
    folder, done = trained
    said = re.search(r"Validation accuracy ([\d.]+)%", done.stdout)[1]
    assert f"{validate(folder / 'best.safetensors'):.1%}" == f"{said}%"


def test_both_metrics_files_have_every_epochs_validation(trained):
    folder, _ = trained
    with (folder / "metrics.csv").open() as file:
        in_table = [float(row["val/accuracy"]) for row in csv.DictReader(file) if row["val/accuracy"]]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    in_lines = [record["val/accuracy"] for record in records if "val/accuracy" in record]
    assert (len(in_table), in_table) == (6, in_lines)


def test_the_output_in_a_pipe_has_one_line_per_epoch_and_no_control_codes(trained):
    _, done = trained
    epochs = re.findall(r"^epoch (\d)/6  train/loss [\d.]+  val/loss [\d.]+  val/accuracy [\d.]+  ", done.stdout, re.M)
    assert (epochs, "\x1b" in done.stdout) == (["1", "2", "3", "4", "5", "6"], False)


def test_the_command_that_it_suggests_for_the_weights_works(trained):
    folder, done = trained
    command = shlex.split(re.search(r"1\. .*\n +(.*)", done.stdout)[1])
    shown = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, timeout=100, check=True)
    assert float(shown.stdout) == pytest.approx(validate(folder / "best.safetensors"))


def test_the_code_that_it_suggests_works(trained):
    _, done = trained
    code = re.sub("^     ", "", done.stdout.split("this runs as it is:\n")[1], flags=re.M)
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert shown.stdout.splitlines()[-1].startswith("completed after 5 epochs")


def test_running_it_again_replaces_what_it_wrote_and_nothing_else(tmp_path, capsys):
    for name in ("metrics.csv", "metrics.jsonl", "best.safetensors", "last.safetensors", "notes.txt"):
        (tmp_path / name).write_text("old")
    code = main(["demo", "--epochs", "1", "--no-bar", "--folder", str(tmp_path)])
    old = sorted(path.name for path in tmp_path.iterdir() if path.read_bytes() == b"old")
    assert (code, old) == (0, ["notes.txt"])


def test_without_a_bar_nothing_is_said_while_it_trains(tmp_path, capsys):
    main(["demo", "--epochs", "1", "--no-bar", "--folder", str(tmp_path)])
    out = capsys.readouterr().out
    assert ("epoch 1/1" in out, "completed after" in out) == (False, False)


def test_the_same_seed_gives_the_same_weights(tmp_path, capsys):
    weights = []
    for name in ("one", "two"):
        main(["demo", "--epochs", "1", "--no-bar", "--seed", "7", "--folder", str(tmp_path / name)])
        weights.append(load_file(tmp_path / name / "last.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_folder_that_is_a_file_is_one_clear_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code = main(["demo", "--folder", str(tmp_path / "file")])
    assert (code, capsys.readouterr().err) == (
        1,
        f"loopline demo: Cannot write into {tmp_path / 'file'}: File exists. Choose another place with --folder.\n",
    )


def test_a_missing_scikit_learn_is_one_clear_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code = main(["demo", "--folder", str(tmp_path)])
    assert (code, capsys.readouterr().err) == (
        1,
        "loopline demo: The demo trains on scikit-learn's digits, and scikit-learn is missing: "
        "pip install 'loopline[demo]'\n",
    )


def test_an_interrupt_ends_with_a_sentence_and_130_and_leaves_nothing_old(tmp_path, capsys, monkeypatch):
    def interrupt(*args, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr("loopline.Trainer.fit", interrupt)
    (tmp_path / "best.safetensors").write_text("of an earlier run")
    code = main(["demo", "--folder", str(tmp_path)])
    assert (
        code,
        f"What was measured until now is in {tmp_path}." in capsys.readouterr().out,
        list(tmp_path.iterdir()),
    ) == (
        130,
        True,
        [],
    )


def test_a_reader_that_has_seen_enough_is_no_failure_to_speak_of(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "loopline", "demo", "--epochs", "1", "--folder", str(tmp_path)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr, (tmp_path / "last.safetensors").exists()) == (1, "", True)


@pytest.mark.parametrize("epochs", ["0", "-1", "many", "1.5"])
def test_a_number_of_epochs_that_makes_no_sense_is_a_wrong_command_line(epochs, capsys):
    with pytest.raises(SystemExit) as left:
        main(["demo", f"--epochs={epochs}"])
    assert (left.value.code, "give a whole number, 1 or more" in capsys.readouterr().err) == (2, True)


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert (left.value.code, capsys.readouterr().out) == (0, f"loopline {loopline.__version__}\n")


def test_without_a_command_the_help_is_shown(capsys):
    assert (main([]), "loopline demo" in capsys.readouterr().out) == (0, True)
