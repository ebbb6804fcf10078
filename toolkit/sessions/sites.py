"""Sites of unequal clusters: each is an asynchronous island with a plan of its own, a link, and a worth."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolkit.errors import BadInput, Problem
from toolkit.plans.exchange import bytes_per_number
from toolkit.recipe.schema import build
from toolkit.recipe.sections import ClusterSection, Recipe
from toolkit.sessions.resolve import Resolved, explain, resolve


@dataclass(frozen=True, kw_only=True)
class SitePlan:
    """One site: its plan, and what it adds to the run."""

    number: int
    resolved: Resolved
    tokens_per_second: float = 0.0
    """That the site adds; 0 if no plan fits it."""
    update_bytes: float = 0.0
    """Of its update after a round."""
    round_seconds: float = 0.0
    link_bytes_per_second: float = 0.0
    price_per_hour: float = 0.0
    """Of all its devices; 0: unknown."""
    link_use: float = 0.0
    """Share of its link that updates take: its own, or those of the others if they are more."""

    @property
    def verdict(self) -> str:
        """Whether the site is worth its link."""
        if self.resolved.decision.chosen is None:
            return explain(self.resolved.decision).replace("\n", ";")
        if self.link_use > 1:
            need = self.link_use * self.link_bytes_per_second * 8e-6
            return f"not worth its link: updates need {need:,.0f} Mbit/s; more local_steps or fewer bits would help"
        return f"updates take {self.link_use:.0%} of its link"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        chosen = self.resolved.decision.chosen
        return {
            "site": self.number,
            "plan": chosen.to_json() if chosen else None,
            "tokens_per_second": self.tokens_per_second,
            "round_seconds": self.round_seconds,
            "update_bytes": self.update_bytes,
            "link_use": self.link_use,
            "tokens_per_price": self.tokens_per_second * 3600 / self.price_per_hour if self.price_per_hour else None,
            "verdict": self.verdict,
        }


def has_sites(recipe: Recipe) -> bool:
    """Whether the recipe lists unequal sites."""
    return isinstance(recipe.cluster, ClusterSection) and isinstance(recipe.cluster.sites, tuple)


def site_recipes(recipe: Recipe) -> list[Recipe]:
    """The recipe of every site. Its cluster is planned as one of equal islands: as many copies as there are sites."""
    section = recipe.cluster
    assert isinstance(section, ClusterSection)
    assert isinstance(section.sites, tuple)
    count, problems = len(section.sites), list(_problems(recipe, len(section.sites)))
    common = {f.name: getattr(section, f.name) for f in fields(section) if f.name != "sites"}
    common = {f.name: common[f.name] for f in fields(section) if f.name in common and common[f.name] != _default(f)}
    sites = []
    for number, given in enumerate(section.sites):
        path = f"cluster.sites.{number}"
        site = build(ClusterSection, {**common, **given}, path, problems)
        if "sites" in given:
            problems.append(Problem(f"{path}.sites", "a site has no sites of its own; remove it"))
        elif isinstance(site, ClusterSection) and site.site_gbps is None:
            problems.append(Problem(f"{path}.site_gbps", "required: bandwidth of its link to the others, Gbit/s"))
        sites.append(site)
    if problems:
        raise BadInput(recipe.name, problems)
    strategy = replace(recipe.strategy, islands=count)
    clusters = [replace(site, nodes=site.nodes * count, sites=count) for site in sites]
    return [replace(recipe, cluster=cluster, strategy=strategy) for cluster in clusters]


def _default(field: Any) -> Any:
    return None if field.default is MISSING else field.default


def _problems(recipe: Recipe, count: int) -> list[Problem]:
    """What unequal sites need of the rest of the recipe."""
    outer, strategy, problems = recipe.train.outer, recipe.strategy, []
    if strategy.name != "local_sgd":
        what = f"{strategy.name} given; unequal sites are islands: use local_sgd, or a number of equal cluster.sites"
        problems.append(Problem("strategy.name", what))
    if outer is None or outer.mode != "async":
        given = outer.mode if outer else "wait"
        what = f"{given} given; unequal sites must not wait for one another: use async"
        problems.append(Problem("train.outer.mode", what))
    if count < 2:
        problems.append(Problem("cluster.sites", f"a list of {count} given; at least two sites are required"))
    if strategy.islands not in (None, count):
        problems.append(Problem("strategy.islands", f"{strategy.islands} given for {count} sites; leave it out"))
    return problems


def site_of(recipe: Recipe, island: int | None) -> Recipe:
    """The recipe of the site that a command starts; the recipe itself if it does not list sites."""
    if not has_sites(recipe):
        return recipe
    sites = site_recipes(recipe)
    if island is None or not 0 <= island < len(sites):
        what = f"required with a list of cluster.sites, 0 to {len(sites) - 1}: each site starts its own island"
        raise BadInput("--island", f"{what}: toolkit train RECIPE --island K --mailbox ADDRESS --mailbox-key FILE")
    return sites[island]


def plan_sites(recipe: Recipe, objective: str = "throughput") -> list[SitePlan]:
    """Plan every site of a recipe."""
    found = [_planned(number, resolve(site, None, objective)) for number, site in enumerate(site_recipes(recipe))]
    sent = [site.update_bytes / site.round_seconds if site.round_seconds else 0.0 for site in found]
    return [
        replace(site, link_use=max(own, sum(sent) - own) / site.link_bytes_per_second)
        for site, own in zip(found, sent, strict=True)
    ]


def _planned(number: int, resolved: Resolved) -> SitePlan:
    chosen, cluster, exchange = resolved.decision.chosen, resolved.job.cluster, resolved.job.workload.exchange
    link = cluster.site_bytes_per_second
    if chosen is None:
        return SitePlan(number=number, resolved=resolved, link_bytes_per_second=link)
    return SitePlan(
        number=number,
        resolved=resolved,
        tokens_per_second=chosen.estimate.tokens_per_second / chosen.plan.islands,
        update_bytes=bytes_per_number(exchange.bits or 32, exchange.density) * resolved.job.model.params,
        round_seconds=chosen.plan.local_steps * chosen.estimate.time.total,
        link_bytes_per_second=link,
        price_per_hour=cluster.price_per_device_hour * cluster.devices / cluster.sites,
    )


def show_sites(sites: list[SitePlan], console: Console) -> None:
    """Print a row per site: its plan, what it adds, and what that costs."""
    total = sum(site.tokens_per_second for site in sites)
    table = Table(
        title=f"{len(sites)} sites, {total:,.0f} tokens/s together", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for heading in ("site", "devices", "plan", "round", "tokens/s", "share", "tokens/price"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for site in sites:
        cluster, chosen, found = site.resolved.job.cluster, site.resolved.decision.chosen, site.to_json()
        worth = found["tokens_per_price"]
        table.add_row(
            str(site.number),
            f"{cluster.devices // cluster.sites} × {cluster.device.name}",
            escape(chosen.plan.describe()) if chosen else "none fits",
            f"{site.round_seconds:.1f} s",
            f"{site.tokens_per_second:,.0f}",
            f"{site.tokens_per_second / total:.0%}" if total else "",
            f"{worth:,.0f}" if worth else "",
        )
    console.print(table)
    for site in sites:
        console.print(f"site {site.number}: {escape(site.verdict)}", highlight=False, soft_wrap=True)
