"""The network between the nodes of an allocation: pairs of nodes and all of them, measured by one step.

The process that examines the allocation serves a store. Every rank arrives there, learns who takes part,
measures its pairs and the world, and leaves its times. No group of all ranks exists before all have arrived.
"""

import json
import os
import sys
import time
from datetime import timedelta
from statistics import median
from typing import Any

from arriero.parallel.world import raise_file_limit
from arriero.train.rank_process import node_name

ROUNDS = 3
_REPEATS = 5


def pairs(nodes: int, round_number: int) -> list[tuple[int, int]]:
    """Return the pairs of one round: each node has another partner in every round (round-robin)."""
    count = nodes + nodes % 2
    if round_number >= count - 1:
        return []
    places = [0, *(1 + (i + round_number) % (count - 1) for i in range(count - 1))]
    met = zip(places[: count // 2], reversed(places[count // 2 :]), strict=True)
    return [(a, b) for a, b in met if max(a, b) < nodes]


def take_part(address: str, timeout: float) -> None:
    """Be one rank of the measurement: arrive, measure pairs and world, report."""
    begun = time.time()
    raise_file_limit()
    import torch
    import torch.distributed as dist

    from arriero.bench.machine import process_started

    phases = {"start Python": begun - process_started(), "import torch": time.time() - begun}
    rank, local = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_LOCALID"])
    host, _, port = address.rpartition(":")
    start = time.time()
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout))
    phases["connect"] = time.time() - start
    store.set(f"arrived/{rank}", json.dumps({"node": node_name(), "local": local, "phases": phases}))
    store.add("arrived", 1)
    present = json.loads(store.get("go"))
    if rank not in present["ranks"]:
        sys.exit(0)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    per_node, index = present["per_node"], present["ranks"].index(rank)
    for number in range(ROUNDS):
        for a, b in pairs(len(present["ranks"]) // per_node, number):
            if index // per_node in (a, b):
                within = index % per_node + (per_node if index // per_node == b else 0)
                found = _measure(f"pair-{number}-{a}-{b}", store, device, within, 2 * per_node, timeout)
                if within == 0:
                    store.set(f"pair/{number}/{a}/{b}", json.dumps(found))
    found = _measure("world", store, device, index, len(present["ranks"]), timeout, clocks=True)
    phases |= {"process group": found.pop("init"), "first collective": found.pop("first")}
    if index == 0:
        store.set("world", json.dumps(found))
    store.set(f"done/{rank}", json.dumps(phases))
    store.add("done", 1)


def _measure(
    name: str, store: Any, device: Any, rank: int, size: int, timeout: float, clocks: bool = False
) -> dict[str, Any]:
    """Return the bus bandwidth of all-reduce in GB/s and the seconds that the group needed to start.

    Each group has its own prefix of the store.
    """
    import torch
    import torch.distributed as dist

    is_gpu = device.type == "cuda"
    start = time.time()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    init = time.time() - start
    # 4 MiB are enough to fill a CPU's loopback, 256 MiB are needed for an NVLink domain
    values = torch.ones((64 if is_gpu else 1) * 2**20, device=device)
    seconds, correct = [], True
    for _ in range(1 + _REPEATS):
        values.fill_(1.0)
        start = time.time()
        dist.all_reduce(values)
        if is_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.time() - start)
        correct = correct and bool((values == size).all())
    first, *later = seconds
    bus = 2 * (size - 1) / size * values.nbytes / median(later) / 1e9
    found = {"gb_per_s": bus, "init": init, "first": first, "correct": correct}
    if clocks:
        found["clocks"] = _clock_offsets(size)
    dist.barrier()
    dist.destroy_process_group()
    return found


def _clock_offsets(size: int) -> list[float]:
    """Return how far the clock of each rank is from the median: all leave a barrier at about one time."""
    import torch
    import torch.distributed as dist

    rows = []
    for _ in range(5):
        dist.barrier()
        every = torch.zeros(size, dtype=torch.float64)
        dist.all_gather(list(every.split(1)), torch.tensor([time.time()], dtype=torch.float64))
        rows.append(every - every.median())
    return torch.stack(rows).median(dim=0).values.tolist()
