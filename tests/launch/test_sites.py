"""Site files, and what site.toml and the command line change."""

import json
import subprocess

import pytest

from arriero.config.site import load_site, seconds_of, site_names
from arriero.errors import UserError
from arriero.plan.hardware import load_cluster
from arriero.slurm import environment_file

FABRIC = ("NCCL_", "GLOO_", "FI_", "MIOPEN_", "MPICH_")


def test_nine_sites_are_shipped():
    names = {"frontier", "lumi", "leonardo", "karolina", "setonix", "alps", "marenostrum5", "jsc", "generic"}
    assert set(site_names()) == names


@pytest.mark.parametrize("name", site_names())
def test_every_variable_has_a_reason_and_those_of_the_fabric_a_source(name):
    site = load_site(name)
    assert site.about
    for variable, each in site.variables().items():
        assert each.reason, variable
        assert each.source or not variable.startswith(FABRIC), variable
    assert load_cluster(site.cluster).devices_per_node == site.slurm.gpus_per_node


@pytest.mark.parametrize("name", [name for name in site_names() if name != "generic"])
def test_a_missing_account_is_named(name):
    with pytest.raises(UserError, match=r"needs slurm.account"):
        load_site(name).require_account()
    load_site(name, {"slurm": {"account": "proj"}}).require_account()


def test_both_are_named_where_account_and_partition_are_missing():
    with pytest.raises(UserError, match=r"slurm.account and slurm.partition"):
        load_site("jsc", {"slurm": {"partition": None}}).require_account()


def test_site_toml_overrides_any_value(tmp_path):
    (tmp_path / "site.toml").write_text(
        'site = "lumi"\n[slurm]\naccount = "project_1"\npartition = "dev-g"\n[container]\nimage = "a.sif"\n'
        '[environment]\nNCCL_DEBUG = "INFO"\nNCCL_NET_GDR_LEVEL = false\n'
        'GLOO_SOCKET_IFNAME = { value = "hsn1", reason = "hsn0 is broken" }\n'
    )
    site = load_site()
    assert (site.name, site.account, site.slurm.partition) == ("lumi", "project_1", "dev-g")
    assert site.slurm.gpus_per_node == 8
    variables = site.variables()
    assert "NCCL_NET_GDR_LEVEL" not in variables
    assert variables["GLOO_SOCKET_IFNAME"].reason == "hsn0 is broken"
    assert variables["NCCL_DEBUG"].value == "INFO"
    assert site.container.command()[:3] == ["singularity", "exec", "--rocm"]
    assert load_site("frontier").slurm.account is None


def test_mistakes_in_a_site_file_are_named(tmp_path):
    (tmp_path / "site.toml").write_text('[slurm]\npartitoin = "x"\n')
    with pytest.raises(UserError, match=r"site.toml: slurm.partitoin"):
        load_site("lumi")
    (tmp_path / "site.toml").unlink()
    with pytest.raises(UserError, match=r"did you mean 'leonardo'"):
        load_site("leonrado")
    with pytest.raises(UserError, match=r"--site"):
        load_site()
    with pytest.raises(UserError, match=r"24:00:00"):
        load_site("lumi", {"slurm": {"time": "1 day"}})


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 5400), ("90:30", 5430), ("24:00:00", 86400), ("2-0", 172800), ("1-2:30", 95400)],
)
def test_time_limits_are_read_as_slurm_reads_them(limit, seconds):
    assert seconds_of(limit) == seconds


def test_the_account_of_gpu_jobs_gets_the_suffix_of_the_site_once():
    assert load_site("setonix", {"slurm": {"account": "pawsey1"}}).account == "pawsey1-gpu"
    assert load_site("setonix", {"slurm": {"account": "pawsey1-gpu"}}).account == "pawsey1-gpu"


def test_values_of_variables_survive_the_shell(tmp_path):
    odd = 'a "b" \\ `c` and $HOME'
    site = load_site("generic", {"environment": {"ODD": odd}})
    (tmp_path / "environment.sh").write_text(environment_file(site.variables()))
    show = ["bash", "-c", '. ./environment.sh && printf %s "$ODD"']
    shown = subprocess.run(show, cwd=tmp_path, capture_output=True, text=True, env={"HOME": "/h"}, check=True)
    assert shown.stdout == 'a "b" \\ `c` and /h'


def test_sites_are_listed_with_their_unverified_values(command):
    assert "leonardo" in command("launch", "sites").stdout
    shown = command("launch", "sites", "leonardo").stdout
    assert "unverified: no document found" in shown
    assert set(json.loads(command("launch", "sites", "--json").stdout)) == set(site_names())
