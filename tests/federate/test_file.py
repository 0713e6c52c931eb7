"""The federation file and `fed init`: what is accepted, and what an error says."""

import pytest

from arriero.errors import UserError
from arriero.federate.coordinator import Coordinator
from arriero.federate.schema import load_federation

SITES = "[[sites]]\nname = 'a'\nrun_file = 'a.toml'\n"


def problem(tmp_path, text):
    (tmp_path / "fed.toml").write_text(text)
    with pytest.raises(UserError) as error:
        load_federation(tmp_path / "fed.toml")
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[federation]\nround = 3\n" + SITES, "federation.round: unknown key; did you mean 'rounds'?"),
        ("[outer]\nmomentun = 0.9\n" + SITES, "outer.momentun: unknown key; did you mean 'momentum'?"),
        (SITES + "adress = 'x'\n", "sites[a].adress: unknown key"),
        ("[federation]\nmode = 'sync'\n" + SITES, "federation.mode: 'sync'"),
        ("[federation]\ntokens = 5\n" + SITES, "federation.tokens: 5: 5 has no unit"),
        ("[federation]\ndeadline = '5 steps'\n" + SITES, "federation.deadline is not a time"),
        ("[federation]\n", "sites: is missing"),
        (SITES + SITES, "two sites are named 'a'"),
        ("[[sites]]\nname = 'A b'\nrun_file = 'x'\n", "sites[A b].name"),
        (SITES + "host = 'login'\n", "sites[a].work is missing"),
        ("[outer\n", "not a readable TOML file"),
    ],
)
def test_a_mistake_is_answered_with_the_key_and_what_to_do(tmp_path, text, said):
    assert said in problem(tmp_path, text)


def test_all_problems_are_reported_at_once(tmp_path):
    text = problem(tmp_path, "[federation]\nround = 3\n[outer]\nlr = -1\n" + SITES)
    assert "2 problems" in text and "federation.round" in text and "outer.lr" in text


def test_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "fed.toml").write_text(SITES)
    config = load_federation(tmp_path / "fed.toml")
    assert config.sites[0].run_file == str(tmp_path / "a.toml")
    assert config.federation.dir == str(tmp_path / "federations")


def test_the_momentum_follows_the_rounds_of_the_first_start(tmp_path):
    run = "[model]\npreset = 'llama-test'\n[data]\nseq_len = 32\nsources = ['builtin:stdlib']\n"
    (tmp_path / "a.toml").write_text(run)

    def optimizer(text):
        (tmp_path / "fed.toml").write_text(text + SITES)
        coordinator = Coordinator.of(tmp_path / "fed.toml")
        coordinator.prepare()
        return coordinator.optimizer.momentum, coordinator.optimizer.lr

    assert optimizer("[federation]\nrounds = 30\n") == (0.45, 0.85)
    assert optimizer("[federation]\nrounds = 60\n") == (0.45, 0.85), "replays need the same numbers"
    many = optimizer("[federation]\nname = 'many'\nrounds = 10000\n")
    assert many == (pytest.approx(0.9, abs=0.01), pytest.approx(0.7, abs=0.01))
    given = optimizer("[federation]\nname = 'given'\n[outer]\nmomentum = 0.6\n")
    assert given == (0.6, 0.8)
    with pytest.raises(UserError, match=r"outer.momentum of .* is 0.6, and the file now says 0.9"):
        optimizer("[federation]\nname = 'given'\n[outer]\nmomentum = 0.9\nlr = 0.8\n")


def test_init_writes_a_file_that_can_be_read(tmp_path, command):
    done = command("fed", "init", "fed.toml", "--site", "here=run.toml", "--site", "there=other.toml")
    assert done.returncode == 0
    config = load_federation(tmp_path / "fed.toml")
    assert [(site.name, site.run_file) for site in config.sites] == [
        ("here", str(tmp_path / "run.toml")),
        ("there", str(tmp_path / "other.toml")),
    ]
    assert command("fed", "init", "fed.toml").returncode == 2


def test_sites_of_different_models_are_rejected(tmp_path, command):
    for name, layers in (("a", 2), ("b", 3)):
        (tmp_path / f"{name}.toml").write_text(
            f"[model]\npreset = 'llama-test'\nlayers = {layers}\n"
            "[data]\nseq_len = 32\nsources = ['builtin:stdlib']\n"
        )
    (tmp_path / "fed.toml").write_text(SITES + "[[sites]]\nname = 'b'\nrun_file = 'b.toml'\n")
    done = command("fed", "run", "fed.toml", "--local")
    assert done.returncode == 2 and "a and b train different models: layers is 2 and 3" in done.stderr
