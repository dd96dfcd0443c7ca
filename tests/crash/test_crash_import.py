"""A27: importing loopline asks the system for nothing that importing torch does not ask for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

ASKED = "socket,connect,bind,clone,clone3,fork,vfork,execve,open,openat,creat,mkdir,mkdirat,unlink,unlinkat,rename"
STRACE = shutil.which("strace")


def odd_calls(program: str, tmp_path) -> list[str]:
    """Sockets, processes, threads, and files that are opened to be written or changed."""
    log = tmp_path / "strace.txt"
    done = subprocess.run(
        [STRACE, "-f", "-qq", "-e", f"trace={ASKED}", "-o", str(log), sys.executable, "-B", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    lines = [re.sub(r"^\d+\s+", "", line) for line in log.read_text().splitlines()]
    reading = re.compile(r"open(at)?\((?!.*(O_WRONLY|O_RDWR|O_CREAT))")
    calls = [line for line in lines if not reading.match(line) and "= -1" not in line and "(" in line]
    return sorted(re.sub(r"\(.*", "", line) for line in calls)


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
def test_the_import_opens_no_socket_process_thread_or_file_beyond_those_of_torch(tmp_path):
    # what torch reads late is asked for in both
    torch = "import torch, torch.utils.data, torch.amp, torch.optim.lr_scheduler"
    assert odd_calls(f"{torch}; import loopline", tmp_path) == odd_calls(torch, tmp_path)


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.parametrize(
    "act",
    [
        "import socket; socket.socket()",
        "import threading; threading.Thread(target=int).start()",
        "open('/dev/null', 'w')",
    ],
)
def test_what_an_import_must_not_do_is_seen(act, tmp_path):
    assert odd_calls(act, tmp_path) != odd_calls("pass", tmp_path)
