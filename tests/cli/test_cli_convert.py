import argparse
import json
import os
import pickle
import resource
import stat
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.torch_version import TorchVersion

from loopline.checkpoint import convert_weights
from loopline.cli import main
from loopline.core.errors import CannotSave, LooplineError

WEIGHTS = {"layer.weight": torch.arange(6.0).reshape(2, 3), "layer.bias": torch.ones(2)}


def converted(path, *options):
    """What `loopline convert` makes of a file: its exit code and the tensors' values."""
    target = path.parent / "out.safetensors"
    code = main(["convert", str(path), str(target), *options])
    return code, {name: value.tolist() for name, value in load_file(target).items()} if target.exists() else None


def values(tensors):
    return {name: value.tolist() for name, value in sorted(tensors.items())}


def lightning(path, **more):
    """A file as Lightning lays it out: the module's weights, and all that its trainer needs."""
    whole = {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": OrderedDict({f"model.{name}": value for name, value in WEIGHTS.items()}),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 3, "completed": 3}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_score": torch.tensor(0.25)}},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(120.0), "exp_avg": torch.ones(2, 3)}}}],
        "lr_schedulers": [{"last_epoch": 3}],
        "hparams_name": "config",
        "hyper_parameters": {"lr": 0.1, "width": 3},
        **more,
    }
    torch.save(whole, path)
    return path


class Payload:
    """What runs a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("place", [None, "state_dict", "model_state_dict", "model"])
@pytest.mark.parametrize("new", [True, False], ids=["zip", "of before 1.6"])
def test_a_state_dict_is_converted_wherever_it_is_kept(tmp_path, capsys, place, new):
    whole = WEIGHTS if place is None else {"epoch": 3, place: WEIGHTS}
    torch.save(whole, tmp_path / "weights.pt", _use_new_zipfile_serialization=new)
    assert converted(tmp_path / "weights.pt") == (0, values(WEIGHTS))


def test_a_lightning_checkpoint_is_converted_and_what_is_left_out_is_listed(tmp_path, capsys):
    code, found = converted(lightning(tmp_path / "last.ckpt"), "--strip", "model", "--json")
    said = json.loads(capsys.readouterr().out)
    assert (code, found, sorted(said["tensors"]), said["left_out"]) == (
        0,
        values(WEIGHTS),
        sorted(WEIGHTS),
        {
            "'epoch'": "int",
            "'global_step'": "int",
            "'pytorch-lightning_version'": "str",
            "'loops'": "dict",
            "'callbacks'": "dict",
            "'optimizer_states'": "list",
            "'lr_schedulers'": "list",
            "'hparams_name'": "str",
            "'hyper_parameters'": "dict",
        },
    )


def test_a_class_that_lightnings_hyper_parameters_name_is_data_and_not_imported(tmp_path, capsys, monkeypatch):
    (tmp_path / "trap.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w')\ndef build(*a, **k): raise SystemExit"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    named = {"_instantiator": "trap.build", "_class_path": "trap.Net", "lr": 0.1}
    path = lightning(tmp_path / "last.ckpt", hyper_parameters=named, datamodule_hyper_parameters=named)
    code, found = converted(path, "--strip", "model.")
    assert (code, found, (tmp_path / "imported").exists(), "trap" in sys.modules) == (0, values(WEIGHTS), False, False)


def test_the_trap_would_spring_if_it_were_imported(tmp_path, monkeypatch):
    (tmp_path / "trap2.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("trap2")
    assert (tmp_path / "imported").exists()


def test_safetensors_are_converted_to_names_without_a_prefix(tmp_path):
    save_file({f"module.{name}": value for name, value in WEIGHTS.items()}, tmp_path / "in.safetensors")
    assert converted(tmp_path / "in.safetensors", "--strip", "module") == (0, values(WEIGHTS))


def test_what_a_file_begins_with_counts_and_not_its_name(tmp_path):
    save_file(WEIGHTS, tmp_path / "pytorch_model.bin")
    assert converted(tmp_path / "pytorch_model.bin") == (0, values(WEIGHTS))


def test_another_entry_can_be_asked_for(tmp_path):
    torch.save({"model": WEIGHTS, "ema": {"w": torch.zeros(1)}}, tmp_path / "both.pt")
    assert converted(tmp_path / "both.pt", "--key", "ema") == (0, {"w": [0.0]})


def test_what_is_no_tensor_in_a_state_dict_is_left_out_and_listed(tmp_path, capsys):
    torch.save({**WEIGHTS, "_extra_state": {"seen": 3}, "steps": 5, 7: "odd"}, tmp_path / "in.pt")
    code, found = converted(tmp_path / "in.pt")
    assert (code, found, capsys.readouterr().out.splitlines()[1:]) == (
        0,
        values(WEIGHTS),
        [
            "left out, for they are no tensors:",
            "  '_extra_state'  dict",
            "  'steps'         int",
            "  int             str",
        ],
    )


def test_tied_viewed_and_turned_tensors_are_each_written_whole(tmp_path):
    base = torch.arange(12.0)
    tensors = {
        "a": base,
        "tied": base,
        "part": base[3:7],
        "turned": base.reshape(3, 4).t(),
        "scalar": torch.tensor(2.0),
    }
    torch.save(tensors, tmp_path / "in.pt")
    assert converted(tmp_path / "in.pt") == (0, values(tensors))


def test_parameters_and_kinds_of_numbers_stay_as_they_are(tmp_path):
    kinds = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint16, torch.bool, torch.float8_e4m3fn]
    tensors = {str(kind): torch.ones(3).to(kind) for kind in kinds} | {"p": torch.nn.Parameter(torch.ones(2))}
    torch.save(tensors, tmp_path / "in.pt")
    convert_weights(tmp_path / "in.pt", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in tensors.items()}


def test_the_new_file_is_its_owners_alone_and_nothing_lies_beside_it(tmp_path):
    torch.save(WEIGHTS, tmp_path / "in.pt")
    umask = os.umask(0)
    try:
        converted(tmp_path / "in.pt")
    finally:
        os.umask(umask)
    files = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in tmp_path.iterdir() if path.name != "in.pt"}
    assert files == {"out.safetensors": "0o600"}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["zip", "of before 1.6", "bare"])
def test_a_payload_is_not_run_and_what_it_asks_for_is_named(tmp_path, capsys, kind, protocol):
    mark = tmp_path / "executed"
    whole = {"state_dict": WEIGHTS, "hyper_parameters": Payload(mark)}
    if kind == "bare":
        (tmp_path / "evil.ckpt").write_bytes(pickle.dumps(whole["hyper_parameters"], protocol))
    else:
        new = kind == "zip"
        torch.save(whole, tmp_path / "evil.ckpt", pickle_protocol=protocol, _use_new_zipfile_serialization=new)
    code, found = converted(tmp_path / "evil.ckpt")
    said = capsys.readouterr().err
    assert (code, found, "asks for posix.system, " in said, "torch.save(model.state_dict()" in said, mark.exists()) == (
        1,
        None,
        True,
        True,
        False,
    )


def test_plain_pickle_would_run_the_payload(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def test_torch_load_without_weights_only_would_run_the_payload(tmp_path):
    torch.save({"hyper_parameters": Payload(tmp_path / "executed")}, tmp_path / "evil.ckpt")
    torch.load(tmp_path / "evil.ckpt", weights_only=False)
    assert (tmp_path / "executed").exists()


def test_the_environment_cannot_make_it_load_without_care(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"a": Payload(tmp_path / "executed")}, tmp_path / "evil.pt")
    assert (converted(tmp_path / "evil.pt")[0], (tmp_path / "executed").exists()) == (1, False)


def test_a_class_that_a_file_needs_is_named_with_the_way_out(tmp_path, capsys):
    torch.save({"args": argparse.Namespace(lr=0.1), "state_dict": WEIGHTS}, tmp_path / "run.pt")
    code, _ = converted(tmp_path / "run.pt")
    assert (code, capsys.readouterr().err) == (
        1,
        f"loopline convert: {tmp_path / 'run.pt'} asks for argparse.Namespace, and making such objects would run code "
        "that the file chooses; only tensors, numbers, text, and lists and dicts of them are read. Run what you trust "
        "with it, the program that wrote it, and let that save the weights alone: torch.save(model.state_dict(), "
        "'weights.pt').\n",
    )


def test_a_whole_module_is_refused_by_its_class(tmp_path, capsys):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    assert (converted(tmp_path / "model.pt")[0], "torch.nn.modules.linear.Linear" in capsys.readouterr().err) == (
        1,
        True,
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_program_is_refused_as_one(tmp_path, capsys):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "program.pt"))
    assert (converted(tmp_path / "program.pt")[0], "is a TorchScript program" in capsys.readouterr().err) == (1, True)


@pytest.mark.parametrize("kind", ["zip", "of before 1.6", "safetensors", "ckpt"])
def test_a_file_that_is_cut_off_anywhere_is_refused_and_nothing_is_written(tmp_path, capsys, kind):
    whole = tmp_path / "whole"
    if kind == "safetensors":
        save_file(WEIGHTS, whole)
    elif kind == "ckpt":
        lightning(whole)
    else:
        torch.save(WEIGHTS, whole, _use_new_zipfile_serialization=kind == "zip")
    data, cut = whole.read_bytes(), tmp_path / "cut"
    codes = set()
    for length in range(1, len(data), max(1, len(data) // 64)):
        cut.write_bytes(data[:length])
        codes.add(converted(cut))
    said = capsys.readouterr()
    lines = said.err.splitlines()
    strange = [line for line in lines if not line.startswith(f"loopline convert: {cut} ")]
    assert (codes, said.out, len(lines) > 60, strange, sorted(path.name for path in tmp_path.iterdir())) == (
        {(1, None)},
        "",
        True,
        [],
        ["cut", "whole"],
    )


def test_what_is_not_there_or_no_file_of_weights_is_one_clear_sentence(tmp_path, capsys):
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.pt").write_text("hello world\n" * 10)
    os.mkfifo(tmp_path / "fifo")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 3, "opt": {"lr": 0.1}}, tmp_path / "none.pt")
    torch.save({"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}}, tmp_path / "other.pt")
    torch.save({"model": WEIGHTS, "state_dict": WEIGHTS}, tmp_path / "two.pt")
    names = ["empty.pt", "folder", "no.pt", "text.pt", "fifo", "list.pt", "none.pt", "other.pt", "two.pt"]
    codes = {converted(tmp_path / name) for name in names}
    said = capsys.readouterr().err.replace(f"{tmp_path}/", "").replace("loopline convert: ", "").splitlines()
    assert (codes, [line.split(" Run what")[0] for line in said]) == (
        {(1, None)},
        [
            "empty.pt is empty.",
            "folder is a folder; give a file. Where weights are in several files, convert each.",
            "There is no file no.pt.",
            "text.pt is cut off or damaged, or no file of torch: KeyError.",
            "fifo is no regular file.",
            "list.pt holds a list, no dict of tensors.",
            "none.pt has no tensors at its top: there are none in it. It has the entries 'epoch', 'opt'.",
            "other.pt has no tensors at its top: there are some under 'a', 'b'; give one as key (--key). "
            "It has the entries 'a', 'b'.",
            "two.pt has weights under 'state_dict', 'model'; say which are meant with key (--key).",
        ],
    )


def test_options_that_fit_nothing_in_the_file_are_one_clear_sentence(tmp_path, capsys):
    torch.save({"state_dict": WEIGHTS, "clash": {"m.a": torch.ones(1), "a": torch.ones(1)}}, tmp_path / "in.pt")
    options = [["--key", "ema"], ["--strip", "mod"], ["--key", "clash", "--strip", "m"]]
    codes = {converted(tmp_path / "in.pt", *given) for given in options}
    said = capsys.readouterr().err.replace(f"{tmp_path}/", "").replace("loopline convert: ", "").splitlines()
    assert (codes, said) == (
        {(1, None)},
        [
            "in.pt has no dict of tensors 'ema' at its top: there are some under 'state_dict', 'clash'; give one as "
            "key (--key). It has the entries 'state_dict', 'clash'.",
            "No tensor in in.pt has a name that begins with 'mod.'; they are 'layer.weight', 'layer.bias'.",
            "Without 'm.' two tensors in in.pt would have one name.",
        ],
    )


def test_a_file_that_is_there_is_replaced_only_by_force_and_the_source_never(tmp_path, capsys):
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(WEIGHTS, source)
    target.write_text("mine")
    before = source.read_bytes()
    codes = [main(["convert", str(source), str(target)]), main(["convert", str(source), str(source), "--force"])]
    kept = target.read_text()
    codes.append(main(["convert", str(source), str(target), "--force"]))
    assert (codes, kept, source.read_bytes() == before, len(load_file(target))) == ([1, 1, 0], "mine", True, 2)


def test_a_target_of_another_kind_is_refused_before_anything_is_read(tmp_path, capsys):
    torch.save(WEIGHTS, tmp_path / "in.pt")
    code = main(["convert", str(tmp_path / "in.pt"), str(tmp_path / "out.pt")])
    assert (code, "give a name that ends with .safetensors" in capsys.readouterr().err) == (1, True)


def packed(path, *, pickled=None, compress=False, extra=0, weights=WEIGHTS):
    """A file as torch.save writes it, but with another pickle, compressed, or with entries that share their bytes."""
    torch.save(weights, path.with_suffix(".plain"))
    with zipfile.ZipFile(path.with_suffix(".plain")) as plain, zipfile.ZipFile(path, "w") as packed:
        for entry in plain.infolist():
            data = plain.read(entry)
            if pickled is not None and entry.filename.endswith("data.pkl"):
                data = pickled
            packed.writestr(entry.filename, data, zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED)
        for number in range(extra):
            again = zipfile.ZipInfo(f"archive/data/{100 + number}")
            last = packed.infolist()[4]
            again.header_offset, again.file_size, again.compress_size, again.CRC = (
                last.header_offset,
                last.file_size,
                last.compress_size,
                last.CRC,
            )
            packed.filelist.append(again)
        packed._didModify = True
    return path


def test_a_bomb_of_zeros_is_not_unpacked(tmp_path, capsys):
    path = packed(tmp_path / "bomb.pt", compress=True, weights={"w": torch.zeros(20_000_000)})
    code, found = converted(path)
    assert (path.stat().st_size < 1_000_000, code, found, "compressed entries" in capsys.readouterr().err) == (
        True,
        1,
        None,
        True,
    )


def test_torch_itself_would_unpack_the_bomb(tmp_path):
    path = packed(tmp_path / "bomb.pt", compress=True, weights={"w": torch.zeros(20_000_000)})
    assert torch.load(path, weights_only=True)["w"].nbytes == 80_000_000


def test_entries_that_share_their_bytes_are_not_unpacked(tmp_path, capsys):
    path = packed(tmp_path / "bomb.pt", extra=100, weights={"w": torch.ones(10_000)})
    assert (converted(path), "more than its own size" in capsys.readouterr().err) == ((1, None), True)


def test_a_few_numbers_that_stand_for_very_many_are_not_written_out(tmp_path, capsys):
    torch.save({"w": torch.ones(1).expand(10**9)}, tmp_path / "wide.pt")
    many = torch.zeros(10_000_000)
    torch.save({str(i): many for i in range(50)}, tmp_path / "tied.pt")
    codes = {converted(tmp_path / "wide.pt"), converted(tmp_path / "tied.pt")}
    assert (codes, capsys.readouterr().err.count("and its tensors would take")) == ({(1, None)}, 2)


def growing(times):
    """A pickle in which a text doubles so often, by a function that reading weights only allows."""
    text = lambda said: b"X" + struct.pack("<I", len(said)) + said  # noqa: E731
    first = b"c_codecs\nencode\n" + text(b"a" * 64) + text(b"latin1") + b"\x86Rq\x01"
    return b"\x80\x02" + first + times * (b"c_codecs\nencode\nh\x01" + text(b"hex") + b"\x86Rq\x01") + b"."


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there the memory can be bounded")
def test_a_pickle_that_doubles_itself_gets_a_gigabyte_and_no_more(tmp_path):
    path = packed(tmp_path / "bomb.pt", pickled=growing(34))
    command = [sys.executable, "-m", "loopline", "convert", str(path), str(tmp_path / "out.safetensors")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        said = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert (process.returncode, "asks for far more memory" in said, used.ru_maxrss < 2_000_000) == (1, True, True)


def test_such_a_pickle_does_grow(tmp_path):
    assert len(torch.load(packed(tmp_path / "bomb.pt", pickled=growing(14)), weights_only=True)) == 64 * 2**14


def test_the_bound_on_memory_is_gone_afterwards(tmp_path):
    torch.save(WEIGHTS, tmp_path / "in.pt")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    converted(tmp_path / "in.pt")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_pickle_that_is_larger_than_any_list_of_names_is_not_read(tmp_path, capsys):
    path = packed(tmp_path / "big.pt", pickled=b"]" * (2**26 + 1))
    assert (converted(path), "more than 64 MB beside its tensors" in capsys.readouterr().err) == ((1, None), True)


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(3, device="meta"), torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex128)],
    ids=["meta", "sparse", "complex128"],
)
@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
def test_tensors_that_the_format_does_not_know_are_refused(tmp_path, tensor):
    torch.save({"w": tensor}, tmp_path / "in.pt")
    with pytest.raises(CannotSave, match="cannot hold"):
        convert_weights(tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_the_format_cannot_write_are_refused(tmp_path, name):
    torch.save({name: torch.ones(1)}, tmp_path / "in.pt")
    with pytest.raises(LooplineError, match="cannot name so"):
        convert_weights(tmp_path / "in.pt", tmp_path / "out.safetensors")


class Attributed(dict):
    """Becomes an OrderedDict in whose instance `items` and `keys` are numbers."""

    def __reduce__(self):
        return OrderedDict, (), {"items": 5, "keys": 5, "values": 5}, None, iter(dict.items(self))


def test_a_dict_that_a_file_gave_attributes_of_its_own_is_read_as_a_dict(tmp_path):
    torch.save({"state_dict": Attributed(WEIGHTS)}, tmp_path / "in.pt")
    assert converted(tmp_path / "in.pt") == (0, values(WEIGHTS))


def test_text_in_a_file_cannot_move_the_cursor(tmp_path, capsys):
    torch.save({"\x1b[2Jw": torch.ones(1), "\x1b]0;t\x07": 5}, tmp_path / "in.pt")
    torch.save({"\x1b[2J": 1, "a\nb": {}}, tmp_path / "none.pt")
    converted(tmp_path / "in.pt")
    converted(tmp_path / "none.pt")
    said = capsys.readouterr()
    assert [letter for letter in said.out + said.err if not letter.isprintable() and letter != "\n"] == []


def test_a_torch_that_reads_files_with_less_care_is_not_used(tmp_path, monkeypatch):
    torch.save(WEIGHTS, tmp_path / "in.pt")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1+cpu"))
    monkeypatch.setattr(torch, "load", pytest.fail)
    with pytest.raises(LooplineError, match=r"Install torch 2\.10 or later"):
        convert_weights(tmp_path / "in.pt", tmp_path / "out.safetensors")


def test_a_disk_that_is_full_leaves_nothing(tmp_path):
    torch.save({"w": torch.ones(10_000)}, tmp_path / "in.pt")
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
    code += "from loopline.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "convert", str(tmp_path / "in.pt"), str(tmp_path / "out.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (
        done.returncode,
        "out.safetensors cannot be written" in done.stderr,
        [p.name for p in tmp_path.iterdir()],
    ) == (
        1,
        True,
        ["in.pt"],
    )
