"""One of several real processes: `dcp_ranks.py write|read FOLDER MEETING RANK SIZE` says in JSON what it found."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist  # noqa: TID251 - a test's own processes
import torch.distributed.checkpoint as torch_dcp  # noqa: TID251 - as above
from torch import nn
from torch.distributed.device_mesh import init_device_mesh  # noqa: TID251 - as above
from torch.distributed.fsdp import fully_shard  # noqa: TID251 - as above
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: TID251 - as above

from loopline.checkpoint.dcp import Dcp, Reader, Writer
from loopline.checkpoint.shelf import Attempt
from loopline.core.errors import CannotSave
from loopline.stores import LocalStore

SECTIONS = ("model", "optimizer/0")
RANDOM = 30
KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)


class Gloo:
    """A Comm over the world's process group."""

    def __init__(self):
        self.rank = self.local_rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def gather(self, value):
        found = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found


class Files:
    """The files that all ranks' attempts have put under one name; hashes are not looked at here."""

    def __init__(self, store, name):
        self.store, self.at = store, f"checkpoints/{name}/"

    @property
    def paths(self):
        return [key.removeprefix(self.at) for key in self.store.keys(self.at)]

    def size(self, path):
        return len(self.read(path))

    def read(self, path):
        with self.store.open(self.at + path) as stream:
            return bytearray(stream.read())


class OffByOne(Reader):
    """The negative control: pieces that are not the first along a dimension are put one place too early."""

    def read_data(self, plan, planner):
        narrow = planner.resolve_tensor

        def early(item):
            at = torch.Size([max(0, start - 1) for start in item.dest_offsets])
            return narrow(type(item)(item.type, item.dest_index, at, item.storage_index, at, item.lengths))

        planner.resolve_tensor = early
        return super().read_data(plan, planner)


def whole():
    """The same tensors in every process."""
    source = torch.Generator().manual_seed(7)

    def make(*shape, kind=torch.float32):
        count = torch.Size(shape).numel() * kind.itemsize
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=source).view(kind).reshape(shape)

    made = {
        "model/even": make(8, 6),
        "model/uneven": make(5, 3),
        "model/less than ranks": make(1, 3),
        "model/empty": torch.empty(0, 3),
        "model/scalar": make(),
        "optimizer/0/step": make(),
    }
    for i in range(RANDOM):
        dims = int(torch.randint(1, 4, (), generator=source))
        shape = torch.randint(1, 8, (dims,), generator=source).tolist()
        made[f"optimizer/0/{i}"] = make(*shape, kind=KINDS[i % len(KINDS)])
    return made


def cut(tensors, mesh, seed):
    """Each tensor as this rank has it: a DTensor cut along a dimension or copied, or, one in five, a plain tensor."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        ways = [Replicate(), *map(Shard, range(tensor.dim()))]
        placements = [ways[int(torch.randint(len(ways), (), generator=draw))] for _ in range(mesh.ndim)]
        plain = tensor.dim() == 0 or torch.rand((), generator=draw) < 0.2
        found[name] = tensor.clone() if plain else distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return found


def sharded_model(mesh, seed):
    """A model as fully_shard cuts it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(tensor):
    tensor = local(tensor).detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def differ(found, expected):
    return sorted(name for name in expected if bits(found[name]) != bits(expected[name]))


def sections(state):
    return {section: {n: t for n, t in state.items() if n.startswith(f"{section}/")} for section in SECTIONS}


def write(store, mesh):
    comm = Gloo()
    state = cut(whole(), mesh, seed=1)
    for name, tensor in sharded_model(mesh, seed=1).state_dict().items():
        state[f"model/fsdp/{name}"] = tensor
    Dcp().write(sections(state), Attempt(store, "ours", "xxh3_128"), comm=comm)
    planner = torch_dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    flat = {name: tensor for tensors in sections(state).values() for name, tensor in tensors.items()}
    torch_dcp.save(flat, storage_writer=Writer(Attempt(store, "by-torch", "xxh3_128"), comm.rank), planner=planner)
    try:
        Dcp().write(sections(state), Attempt(store, f"alone-{comm.rank}", "xxh3_128"))
    except CannotSave as error:
        return {"alone": str(error)}
    return {"alone": "was written"}


def read(store, mesh):
    expected = cut(whole(), mesh, seed=2)
    torch.manual_seed(1)
    reference = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).state_dict()
    model = sharded_model(mesh, seed=99)
    fsdp = {f"model/fsdp/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, tensor in fsdp.items():
        full = reference[name.removeprefix("model/fsdp/")]
        expected[name] = distribute_tensor(full, mesh, tensor.placements, src_data_rank=None)

    def places():
        return {name: torch.zeros_like(t) for name, t in expected.items() if isinstance(t, DTensor)} | fsdp

    files = Files(store, "ours")
    into = places()
    found = Dcp().read(SECTIONS, files, into=into)
    model_differs = differ({f"model/fsdp/{name}": t for name, t in model.state_dict().items()}, fsdp)
    said = {
        "differ": differ(found, expected) + model_differs,
        "filled": all(found[name] is into[name] for name in into),
    }
    by_torch = places()
    torch_dcp.load(
        by_torch,
        storage_reader=Reader(Files(store, "by-torch")),
        planner=torch_dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    said["by torch"] = differ(by_torch, {name: expected[name] for name in by_torch})
    import loopline.checkpoint.dcp as module

    module.Reader = OffByOne
    said["off by one"] = differ(Dcp().read(SECTIONS, files, into=places()), expected)
    return said


def main(what, folder, meeting, rank, size):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(size))
    shape = (2, int(size) // 2) if int(size) % 2 == 0 and int(size) > 2 else (int(size),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    said = {"write": write, "read": read}[what](LocalStore(Path(folder)), mesh)
    dist.barrier()
    sys.stdout.write(f"{json.dumps(said)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
