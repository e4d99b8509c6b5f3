"""Readings of settings: what follows from the text of one of them."""

from __future__ import annotations

from headway.config.broker import shown_url


class Readings:
    """Part of Settings that reads its fields."""

    tiers: str
    default_tier: str
    tier_rates: str
    shed_depths: str
    devices: str
    workers: int
    tls_cert: str
    broker: str

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names of the tiers, highest first."""
        return tuple(name.strip() for name in self.tiers.split(","))

    @property
    def default_tier_index(self) -> int:
        """Index of `default_tier` in `tier_names`."""
        return self.tier_names.index(self.default_tier)

    def tier_rate(self, tier: str) -> float:
        """Requests per minute of all users of a tier together; 0 for no limit."""
        rates = (part.strip().partition("=") for part in self.tier_rates.split(","))
        return next((float(rate) for name, _, rate in rates if name == tier), 0.0)

    @property
    def shed_at(self) -> tuple[int, int] | None:
        """The two numbers of `shed_depths`; None for auto."""
        if self.shed_depths == "auto":
            return None
        lowest, _, all_but_highest = self.shed_depths.partition(",")
        return int(lowest), int(all_but_highest)

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Ids of the GPUs in `devices`, one for each worker; `cpu` alone stands for all workers. Empty without it."""
        ids = tuple(part.strip() for part in self.devices.split(",")) if self.devices else ()
        return ids * self.workers if ids == ("cpu",) else ids

    @property
    def scheme(self) -> str:
        """Scheme of the URLs of all ports."""
        return "https" if self.tls_cert else "http"

    @property
    def broker_shown(self) -> str:
        """The broker's URL without user, password and options; empty when there is none."""
        return shown_url(self.broker)
