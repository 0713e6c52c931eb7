"""The coordinator: prepare a federation, ask idle sites to train, close rounds, publish global models."""

import json
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Self

import tomlkit
import torch

from arriero.checkpoint.convert import open_adapter, open_model
from arriero.checkpoint.directory import resolve_checkpoint
from arriero.checkpoint.formats.model_reader import Adapter, ModelReader
from arriero.checkpoint.formats.peft_directory import CONFIG
from arriero.config.fields import to_toml, toml_value
from arriero.config.load import config_from_toml, load_run
from arriero.config.schema import RunConfig
from arriero.data.text.hub import local_model
from arriero.errors import UserError
from arriero.federate.members import MemberManifest, open_global, publish_first_model
from arriero.federate.outer import OuterOptimizer
from arriero.federate.round_files import Assignment
from arriero.federate.rounds import Rounds, balanced_tokens, remaining_tokens
from arriero.federate.schema import FederationConfig, OuterSection, SiteSection, load_federation, with_numbers
from arriero.federate.site import SitePaths
from arriero.files import locked, publish_file
from arriero.model.adapters import AdapterSettings, adapter_of, initial_std
from arriero.model.family import build_model
from arriero.model.language_model import InitRule, fill
from arriero.model.name_maps import own_tensors
from arriero.model.presets import expand
from arriero.plan.rules import spec_of

_STORED = "federation.toml"
_RECENT = 3
# addresses and keys stay in the user's file
_PRIVATE = {"host", "port", "user", "key", "known_hosts"}


@dataclass
class Coordinator:
    """`source` is the federation file, read again at each round, so that sites may join and leave."""

    source: Path | None
    config: FederationConfig

    @classmethod
    def of(cls, path: Path) -> Self:
        return cls(path, load_federation(path))

    @cached_property
    def folder(self) -> Path:
        return Path(self.config.federation.dir) / self.config.federation.name

    @cached_property
    def rounds(self) -> Rounds:
        weights = {site.name: site.weight for site in self.config.sites}
        return Rounds(self.folder, self.config.federation, self.optimizer, weights)

    @cached_property
    def outer(self) -> OuterSection:
        """The outer optimizer with the numbers of the first start, also if rounds were added since."""
        given, stored = self.config.outer, self.folder / _STORED
        if stored.is_file():
            first = load_federation(stored)
            known = with_numbers(first.outer, first.federation.rounds)
            same = known.optimizer == given.optimizer
            missing = [key for key in ("momentum", "lr") if same and getattr(given, key) is None]
            given = given.model_copy(update={key: getattr(known, key) for key in missing})
        return with_numbers(given, self.config.federation.rounds)

    @property
    def optimizer(self) -> OuterOptimizer:
        values = self.outer.model_dump(include={"lr", "momentum", "beta2", "eps"})
        return OuterOptimizer(self.outer.optimizer, **values)

    @property
    def names(self) -> list[str]:
        return [site.name for site in self.config.sites]

    @property
    def last_round(self) -> int:
        """Return the number of the final global model."""
        rounds = self.config.federation.rounds
        return rounds * len(self.names) if self.config.federation.mode == "asynchronous" else rounds

    @property
    def is_finished(self) -> bool:
        return self.rounds.number >= self.last_round

    @property
    def lock_file(self) -> Path:
        """The process of `arriero fed run` holds a lock on it."""
        return self.folder.with_name(f".{self.folder.name}.lock")

    def lock(self):
        return locked(
            self.lock_file,
            self.folder,
            busy="wait for it or stop it, or choose another federation.name",
            unwritable="set federation.dir to a directory you may write",
        )

    def run_file(self, site: str) -> Path:
        """Return the resolved run file that a site receives."""
        return self.folder / "sites" / f"{site}.toml"

    def work(self, site: SiteSection) -> Path:
        return Path(site.work) if site.work else self.folder / "sites" / site.name

    def paths(self, site: SiteSection, order: Assignment) -> SitePaths:
        """Return the paths of a site on this machine, for a round or an evaluation."""
        number = order.round
        out = self.rounds.inbox(site.name, number) if order.steps else self.evaluation(site.name, number)
        return SitePaths(self.rounds.model(number), self.run_file(site.name), self.work(site), out)

    def evaluation(self, site: str, number: int) -> Path:
        """Return the file with the validation loss of a global model at a site."""
        return self.rounds.at(number) / "evaluation" / f"{site}.json"

    def evaluation_order(self, site: str, number: int) -> Assignment:
        about: dict[str, Any] = {"tokens": 0, "horizon": 1, "codec": "bf16", "inner": "continue"}
        return Assignment(site=site, round=number, steps=0, at=time.time(), **about)

    def final_losses(self) -> dict[str, float]:
        """Return the validation loss of the newest global model at each site that has evaluated it."""
        paths = sorted(self.evaluation("", self.rounds.number).parent.glob("*.json"))
        found = {path.stem: json.loads(path.read_bytes())["eval_loss"] for path in paths}
        return {site: loss for site, loss in found.items() if loss is not None}

    def mean_final_loss(self) -> float | None:
        losses = self.final_losses()
        return sum(losses.values()) / len(losses) if losses else None

    def accounts(self) -> dict[str, int]:
        """Return the tokens of all members by what became of them."""
        history = self.rounds.history()
        members = [member for group in self.rounds.candidates() for member in group]
        return {
            "accepted": sum(each.tokens for closed in history for each in closed.accepted),
            "discarded": sum(each.tokens for closed in history for each in closed.discarded),
            "waiting": sum(member.manifest.tokens for member in members),
        }

    def prepare(self) -> None:
        """Check the run files of all sites and publish the first global model."""
        configs = self._resolve_sites()
        self._check_unchanged()
        stored = self.config.model_copy(update={"outer": self.outer})
        publish_file(self.folder / _STORED, _public(stored).encode())
        if self.rounds.model(0).is_dir():
            return
        publish_first_model(self._first_model(configs), self.rounds.model(0), self.optimizer)
        tokenizer = self.config.federation.tokenizer
        self.rounds.events.write("start", sites=self.names, tokenizer=bool(tokenizer))

    def _resolve_sites(self) -> dict[str, RunConfig]:
        """Write each site's run file with every value resolved; all must describe the same model."""
        (self.folder / "sites").mkdir(parents=True, exist_ok=True)
        configs: dict[str, RunConfig] = {}
        for site in self.config.sites:
            config = load_run(Path(site.run_file), self._sets(site), expand).config
            configs[site.name] = config
            path, content = self.run_file(site.name), to_toml(config).encode()
            if not path.is_file() or path.read_bytes() != content:
                publish_file(path, content)
        first = self.config.sites[0].name
        for name, config in configs.items():
            if _adapter(config) != _adapter(configs[first]):
                raise UserError(
                    f"{first} and {name} train different adapters, or only one of them trains an adapter",
                    "give the run files of all sites the same [lora], [prefix] or [llama_adapter]",
                )
            if _adapter(config) is not None and not config.checkpoint.start_from:
                raise UserError(
                    f"{name} trains an adapter and names no base model",
                    "set federation.model, or checkpoint.start_from in its run file",
                )
            if (ours := spec_of(configs[first]).to_dict()) != (theirs := spec_of(config).to_dict()):
                odd = next(key for key in ours if ours[key] != theirs.get(key))
                raise UserError(
                    f"{first} and {name} train different models: {odd} is {ours[odd]} and {theirs.get(odd)}",
                    "give the run files of all sites the same [model]",
                )
        return configs

    def _sets(self, site: SiteSection) -> list[str]:
        sets = list(site.set)
        if site.data:
            prompt = {} if site.prompt is None else {"prompt": site.prompt}
            sets.append(f"data.sources={toml_value([{'path': path, **prompt} for path in site.data])}")
        model = self.rounds.model(0)
        is_whole = model.is_dir() and not (model / CONFIG).is_file()
        start = str(model) if is_whole else self.config.federation.model
        return [*sets, f"checkpoint.start_from='{start}'"] if start else sets

    def _check_unchanged(self) -> None:
        """Reject changes that would make the rounds of one federation inconsistent."""
        path = self.folder / _STORED
        if not path.is_file():
            if self.folder.is_dir() and (self.folder / "rounds").exists():
                raise UserError(f"{self.folder} has rounds but no {_STORED}", "choose another name")
            return
        first = load_federation(path)
        there = with_numbers(first.outer, first.federation.rounds).model_dump(mode="json")
        here = self.outer.model_dump(mode="json")
        for key in ("optimizer", "lr", "momentum", "beta2", "eps"):
            if there[key] != here[key]:
                raise UserError(
                    f"outer.{key} of {self.folder} is {there[key]}, and the file now says {here[key]}",
                    "keep it, so that rounds can be replayed; or choose another federation.name",
                )

    def _first_model(self, configs: Mapping[str, RunConfig]) -> ModelReader:
        given, tokenizer = self.config.federation.model, self.config.federation.tokenizer
        files = {} if tokenizer is None else {"tokenizer.json": Path(tokenizer)}
        if tokenizer is not None and not Path(tokenizer).is_file():
            raise UserError(f"federation.tokenizer: there is no {tokenizer}", "give a tokenizer.json")
        config = configs[self.config.sites[0].name]
        if (settings := _adapter(config)) is not None:
            return _first_adapter(config, settings, files)
        if given is not None:
            source = open_model(resolve_checkpoint(local_model(given)))
            return replace(source, extra_files={**source.extra_files, **files})
        spec = spec_of(config)
        model = build_model(spec)
        model.init_weights(config.run.seed)
        state = model.state_dict()
        return ModelReader("memory", "initial weights", spec, own_tensors(spec), state.__getitem__, files)

    def reload(self) -> None:
        """Read the federation file again: sites may have joined or left."""
        if self.source is None:
            return
        new = load_federation(self.source)
        if new.sites != self.config.sites:
            joined = {site.name for site in new.sites} - set(self.names)
            left = set(self.names) - {site.name for site in new.sites}
            self.config = self.config.model_copy(update={"sites": new.sites})
            self._resolve_sites()
            self.rounds.events.write("sites", joined=sorted(joined), left=sorted(left))

    def assign_idle(self) -> dict[str, Assignment]:
        """Ask every idle site to train from the newest model; return what each site works on."""
        found = {}
        for site in self.names:
            pending = self.rounds.pending(site)
            if pending is None and self.rounds.assignment(site, self.rounds.number) is None:
                pending = self._assign(site)
            if pending is not None:
                found[site] = pending
        return found

    def _assign(self, site: str) -> Assignment:
        nominal = {name: self._nominal(name) for name in self.names}
        tokens = nominal[site]
        if self.config.federation.balance:
            speeds, waits = self._measured()
            tokens = balanced_tokens(nominal, speeds, waits)[site]
            left = self.rounds.seconds_left(speeds, waits)
            if left is not None and site in speeds:
                tokens = remaining_tokens(nominal[site], tokens, speeds[site], left - waits[site])
        batch = config_from_toml(self.run_file(site)).train.batch.amount
        steps, rounds = max(1, round(tokens / batch)), self.config.federation.rounds
        horizon = rounds * max(1, math.ceil(nominal[site] / batch))
        outer, about = self.config.outer, {"horizon": horizon, "codec": self.config.outer.codec}
        # the optimizer state of a site whose delta was refused may be what spoilt it
        inner = "reset" if self._was_refused(site) else outer.inner
        return self.rounds.assign(site, steps, steps * batch, inner=inner, **about)

    def _was_refused(self, site: str) -> bool:
        """Return whether the delta of a site was refused in the last round that it was asked for."""
        for number in range(self.rounds.number - 1, -1, -1):
            if self.rounds.assignment(site, number) is not None:
                return any(each.final and each.member for each in self.rounds.refusals(number, site))
        return False

    def _nominal(self, site: str) -> int:
        span, batch = self.config.federation.tokens, config_from_toml(self.run_file(site)).train.batch.amount
        return span.in_tokens(batch)

    def _measured(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return tokens per second and seconds in the queue of each site: medians of its last members."""
        found: dict[str, list[MemberManifest]] = {}
        for number in range(max(0, self.rounds.number - 10), self.rounds.number + 1):
            for site, member in self.rounds.members(number).items():
                if member.manifest.seconds > 0:
                    found.setdefault(site, []).append(member.manifest)
        # one round with a fault must not shorten the next
        last = {site: members[-_RECENT:] for site, members in found.items()}
        speeds = {site: median(m.tokens / m.seconds for m in members) for site, members in last.items()}
        return speeds, {site: median(m.waited for m in members) for site, members in last.items()}

    def measured_speeds(self) -> dict[str, float]:
        """Return tokens per second of each site in its last round."""
        return self._measured()[0]

    def replay(self, scratch: Path) -> list[tuple[int, bool]]:
        """Recompute every global model from the first one and the accepted members; compare the bits."""
        results = []
        base = self.rounds.model(0)
        for closed in self.rounds.history():
            target = scratch / f"{closed.round + 1:04d}"
            made = self.rounds.replayed(closed, target, base)
            stored = self.rounds.model(closed.round + 1)
            if not stored.is_dir():
                break
            results.append((closed.round + 1, made.model == open_global(stored).model))
            if base.parent == scratch:
                shutil.rmtree(base)
            base = target
        return results


def _adapter(config: RunConfig) -> AdapterSettings | None:
    return adapter_of(config.model_dump())


def _first_adapter(config: RunConfig, settings: AdapterSettings, files: dict[str, Path]) -> ModelReader:
    """Return the adapter that the run file starts from, or initial values; the base model is not read."""
    section, spec = config.checkpoint, spec_of(config)
    own = own_tensors(spec)
    made = {name: torch.empty(meta.shape) for name, meta in settings.tensors(own).items()}
    if section.adapter_from is not None:
        stored = open_adapter(local_model(section.adapter_from), spec)
        there, here = ({name: t.shape for name, t in each.items()} for each in (stored.tensors, made))
        scales = {getattr(each, "scale", None) for each in (stored.settings, settings)}
        if there != here or len(scales) > 1:
            found = f"{section.adapter_from} has {stored.settings.label} ({stored.settings.summary})"
            raise UserError(
                f"checkpoint.adapter_from: {found}, and the run files have another",
                "give the run files the same adapter, or remove checkpoint.adapter_from",
            )
        made = {name: stored.load(name) for name in stored.tensors}
    else:
        for name, tensor in made.items():
            fill(tensor, name, InitRule(initial_std(name, tensor.shape[-1])), config.run.seed)
    adapter = Adapter(settings, made, made.__getitem__, section.start_from)
    return ModelReader("peft", "the first adapter", spec, own, own.__getitem__, files, adapter=adapter)


def _public(config: FederationConfig) -> str:
    """Return the federation file without addresses and keys."""
    sites = tuple(site.model_copy(update=dict.fromkeys(_PRIVATE)) for site in config.sites)
    content: dict[str, Any] = config.model_copy(update={"sites": sites}).model_dump(
        mode="json", exclude_none=True
    )
    return tomlkit.dumps(content)
