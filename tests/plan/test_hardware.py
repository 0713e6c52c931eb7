import re

import pytest

from arriero.errors import UserError
from arriero.plan.hardware import cluster_names, cluster_of_device, load_cluster, peak_of


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("AMD Instinct MI250X/MI250", 191.5e12),
        ("AMD Instinct MI300X OAM", 1307.4e12),
    ],
)
def test_known_devices_have_their_published_peak(name, peak):
    assert peak_of(name).bf16 == peak


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090", "NVIDIA GB200", "NVIDIA GH200 480GB", "AMD Instinct MI300A", "CPU"]
)
def test_an_unknown_device_has_no_peak_rather_than_a_guess(name):
    assert peak_of(name) is None


@pytest.mark.parametrize("name", cluster_names())
def test_every_shipped_cluster_connects_all_its_devices(name):
    cluster = load_cluster(name)
    assert cluster.about
    assert cluster.size == 1 or (cluster.links[-1].devices or cluster.size) >= cluster.size
    assert cluster.machine.devices_per_node == cluster.devices_per_node


def test_a_cluster_is_found_by_the_name_of_its_device():
    cluster = cluster_of_device("H100-80GB", 20)
    assert (cluster.device.name, cluster.nodes) == ("NVIDIA H100 80GB HBM3", 3)


GOOD = """
device = "h100"
devices_per_node = 8
nodes = 4
[[links]]
name = "NVLink"
devices = 8
bandwidth = 450
[[links]]
name = "network"
bandwidth = 50
"""
LINKS = GOOD[GOOD.index("[[links]]") :]


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("nodes = 4", "", "nodes is missing"),
        ("nodes = 4", "nodes = 0", "nodes is 0"),
        ("nodes = 4", "nodes = 4.5", "nodes is 4.5"),
        ("nodes = 4", "nodes = true", "nodes is True"),
        ("bandwidth = 450", "bandwidth = -1", "links[0].bandwidth is -1"),
        ("bandwidth = 450", "bandwidth = nan", "links[0].bandwidth is nan"),
        ("bandwidth = 450", "bandwidth = 9000", "links[0].bandwidth is 9000, more than"),
        ("devices = 8", "devices = 1", "links[0].devices is 1"),
        ('name = "network"', 'name = "network"\ndevices = 4', "links[1].devices is 4"),
        ('name = "network"', 'name = "network"\ndevices = 16', "connect 16 of the 32 devices"),
        ("nodes = 4", "nodes = 4\nnode = 3", "node is not a key"),
        ('"h100"', '"h1000"', "there is no device 'h1000'"),
        ('"h100"', "3", "device must be a name or a table"),
        (LINKS, 'links = "fast"', "links must be a list of tables"),
        (LINKS, "links = [3]", "links[0] must be a table"),
        ('"h100"', '{ type = "h100", memory = 1e9 }', "device.memory is 1000000000.0"),
    ],
)
def test_a_cluster_file_with_a_wrong_number_is_refused_by_key(tmp_path, old, new, key):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    assert load_cluster(file).name == "mine"
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UserError, match=re.escape(key)):
        load_cluster(file)


def test_a_lower_power_limit_lowers_the_clock(tmp_path):
    file = tmp_path / "slow.toml"
    file.write_text(GOOD.replace('"h100"', '{ type = "h100", power = 500, bandwidth = 2.4 }'))
    device = load_cluster(file).device
    assert 0.85 < device.clock < 0.95 and device.bf16 == 989


def test_an_unknown_cluster_is_answered_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'frontier'"):
        load_cluster("fronteer")
