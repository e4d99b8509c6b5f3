"""Wires a process in any role: connects the parts that the other modules of this package build. Each role is the same
`Service` without the parts that `roles` leaves out. Imports that only some roles, settings or ports need are inside
functions, which saves memory and startup time in other processes."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headway.admin import routes as admin
from headway.admin.process import ProcessView
from headway.admin.snapshot import SnapshotSource
from headway.app.backends import make_remote_certificates
from headway.app.brokers import make_broker_bundle, queue_limits
from headway.app.devices import NO_DEVICES, Devices
from headway.app.lifecycle import PortListener, Resource, Service
from headway.app.model_plans import Given, ModelPlan, WeightsResource, check_weights, make_plans
from headway.app.process_figures import FigureSource, OpenPort, describe_process, expected_workers
from headway.app.roles import ROLES, Parts
from headway.config import FIELDS, Settings, fallbacks_of, flag, idle, is_loopback
from headway.config.extras import needing
from headway.config.target import Target
from headway.core.health import HEARTBEAT_EVERY
from headway.doors.readiness import Readiness
from headway.errors import SettingError
from headway.fleet.board_reporter import BoardReporter
from headway.fleet.membership import Membership
from headway.fleet.pace import Pace
from headway.http.server.listener import Listener
from headway.model import ProcessInfo, Role
from headway.ports import Broker, Ledger
from headway.runtime.certificates import Certificates, RemoteCertificates
from headway.runtime.counters import Counters
from headway.runtime.logger import get_logger
from headway.runtime.request_id import new_id

if TYPE_CHECKING:
    from headway.app.input_policy import PolicyResource
    from headway.bulk.jobs import BulkJobs
    from headway.bulk.seat_runner import SeatRunner
    from headway.controller.controller import Controller
    from headway.doors.entrance import Entrance
    from headway.fleet.models import FleetModels
    from headway.gateway.direct_mode import Fallback
    from headway.gateway.fleet_watchers import Learner, WorkersWatcher
    from headway.gateway.gateway import Gateway
    from headway.gateway.ledger_writer import LedgerWriter
    from headway.gateway.pending import Observer
    from headway.worker.pool import WorkerPool, Workers

log = get_logger(__name__)


class Components(msgspec.Struct, frozen=True):
    """The services of a process, and its id in the fleet."""

    id: str
    gateway: Gateway | None
    fallback: Fallback | None
    pool: Workers | None
    controller: Controller | None

    @property
    def slots(self) -> Collection[str]:
        return self.pool.slots if self.pool is not None else frozenset()


class Clients(msgspec.Struct, frozen=True):
    """The parts that client requests pass through. `runner` and `bulk` are None if bulk jobs are off."""

    entrance: Entrance
    runner: SeatRunner | None = None
    bulk: BulkJobs | None = None


class Process(msgspec.Struct, frozen=True):
    """A process that is ready to start, with a plan for each model that it runs."""

    settings: Settings
    role: Role
    plans: Mapping[str, ModelPlan]
    pool: Workers | None
    service: Service
    admin: Listener
    public: Listener | None

    @property
    def target(self) -> Target | None:
        return next((plan.target for plan in self.plans.values()), None)

    @property
    def devices(self) -> Devices:
        return next((plan.devices for plan in self.plans.values()), NO_DEVICES)


def build(settings: Settings, role: Role, given: Given = "", listener: type[Listener] = Listener) -> Process:
    """Build a process without starting it. See `runner.run` for the other arguments and the errors raised."""
    parts = ROLES[role]
    if not (settings.broker or parts.alone):
        reason = f"is needed by a {role.value}, which works with other processes"
        hint = "Name the Redis or Valkey that all processes share, for example --broker redis://127.0.0.1:6379/0"
        raise SettingError("broker", "", reason, f"{hint}; or run everything in one process with headway serve.")
    if parts.controller:
        from headway.app.scaling import check_to_zero

        check_to_zero(settings)
    host = re.sub("[^A-Za-z0-9_.-]", "-", socket.gethostname())[:100]  # Names of processes allow only these characters.
    given_name = settings.name
    settings = dataclasses.replace(settings, name=given_name or f"{host}-{os.getpid()}")
    plans = make_plans(settings, given) if parts.batchers else {}
    if parts.gateway:
        check_weights(settings, {name: model.version_weights for name, model in settings.served.items()})
    tell_of_other_roles(settings, parts)
    if plans:
        if settings.models_per_gpu and len(settings.served) < 2:
            log.warning(
                "a setting has no effect", setting=flag("models_per_gpu"), without="a second model that runs here"
            )
        if not parts.gateway:
            warn_of_idle(settings, [(name, missing) for name, missing in idle(settings) if name == "min_warm"])
    return _Wiring(settings, role, plans, listener).process("" if given_name else settings.name, host)


class _Wiring:
    """Connects the parts of one process. Each step uses the parts of earlier steps. The settings must name the process."""

    _service: Service

    def __init__(
        self, settings: Settings, role: Role, plans: Mapping[str, ModelPlan], listener: type[Listener]
    ) -> None:
        self.settings, self.role, self.plans, self.listener = settings, role, plans, listener
        parts = self.parts = ROLES[role]
        self.clock, self.counters = clock, counters = time.monotonic, Counters()
        bundle = self.bundle = make_broker_bundle(settings, counters.broker, clock)
        self.held = None
        if parts.gateway:
            from headway.gateway.pending import PendingTable

            self.held = PendingTable()
        self.ledger, self.ledger_writer = self._ledger()
        self.policy: PolicyResource | None = None
        targets = [plan.target for plan in plans.values()]
        if parts.gateway and settings.input_policy:
            from headway.app.input_policy import PolicyResource

            self.policy = PolicyResource(settings, [*settings.served], counters.input_policy, counters.worker.restarts)
        if parts.gateway and fallbacks_of(settings):
            from headway.app.workers import fallback_targets

            targets += fallback_targets(settings).values()
        remote = make_remote_certificates(settings, targets, counters.tls)
        tracing = None
        if settings.trace:
            from headway.app.tracing import make_tracing

            tracing = make_tracing(settings, role, counters.spans_dropped, clock)
        self.recorder = tracing.recorder if tracing is not None else None
        self.pace = Pace(clock, may_rest=bool(settings.broker) and not plans)
        self.fleet_models = make_fleet_models(settings, parts, bundle.broker, self._serve_models, self._forget, clock)
        self.pools: Mapping[str, WorkerPool] = {}
        self.made = self._components(remote)
        self.membership = self._membership()
        self.expected = expected_workers(settings, parts, plans)
        self.certificates: Certificates | None = None
        if settings.tls_cert and listener.takes_address:
            self.certificates = Certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca, counters.tls)
        exporter = tracing.exporter if tracing is not None else None
        resources = exporter, self.certificates, remote, self.ledger_writer
        self.resources: list[Resource] = [resource for resource in resources if resource is not None]
        self.further: list[PortListener] = []

    def _ledger(self) -> tuple[Ledger | None, LedgerWriter | None]:
        if not self.settings.ledger:
            return None, None
        from headway.app.stores import make_ledger
        from headway.gateway.ledger_writer import LedgerWriter

        ledger = make_ledger(self.settings.ledger)
        return ledger, LedgerWriter(ledger, self.settings, self.counters.store, self.clock, held=self.held)

    def _components(self, remote: RemoteCertificates | None) -> Components:
        settings, parts, bundle, plans = self.settings, self.parts, self.bundle, self.plans
        counters, clock, recorder = self.counters, self.clock, self.recorder
        fallback = gateway = pool = controller = None
        if parts.gateway:
            fallback, gateway = self._gateway(remote)
        id = gateway.name if gateway is not None else settings.name
        if plans:
            from headway.app.workers import make_pools

            pool = make_pools(
                plans, bundle, id, counters.worker, clock, decides=parts.gateway, certificates=remote, recorder=recorder
            )
            from headway.app.scaling import local_pools

            self.pools = local_pools(settings, plans, pool)
        if parts.controller:
            from headway.app.scaling import make_autoscaler
            from headway.controller.controller import Controller

            controller = Controller(
                id,
                bundle.broker,
                bundle.fleet,
                settings.target_utilisation,
                clock,
                self.pace,
                alone=not settings.broker,
                counters=counters.controller,
                models=self._served_models,
                autoscaler=make_autoscaler(settings, self.fleet_models, self.pools, counters.controller, clock),
            )
        return Components(id, gateway, fallback, pool, controller)

    def _gateway(self, certificates: RemoteCertificates | None) -> tuple[Fallback | None, Gateway]:
        from headway.gateway.gateway import Gateway
        from headway.gateway.request_log import AccessLog

        settings, counters = self.settings, self.counters
        fallback = traces = None
        if fallbacks_of(settings):
            from headway.app.workers import make_fallback

            fallback = make_fallback(settings, counters, self.clock, certificates, self.recorder)
        observers: list[Observer] = [self.ledger_writer] if self.ledger_writer is not None else []
        if settings.access_log:
            observers.append(AccessLog(settings.access_log, settings.tier_names, random.random))
        if self.recorder is not None:
            from headway.gateway.request_traces import RequestTraces

            traces = RequestTraces(self.recorder, settings.tier_names, counters.gateway, settings.scheme)
        return fallback, Gateway(
            settings,
            [*settings.served],
            self.bundle.broker,
            counters.gateway,
            self.clock,
            direct=fallback,
            observers=observers,
            gate=self.policy.gate if self.policy is not None else None,
            traces=traces,
            held=self.held,
            woken=self._woken,
            in_doubt=(lambda: False) if self.fleet_models is None else self.fleet_models.in_doubt,
        )

    def _membership(self) -> Membership:
        made, bundle, drained = self.made, self.bundle, None
        if made.pool is not None:
            from headway.worker.pool import carry_out

            drained = partial(carry_out, process=made.id, pool=made.pool)
        killed = self.counters.departures.take_killed
        return Membership(
            bundle.fleet, self._describe, self.clock, bundle.broker, made.slots, self._every, drained, killed
        )

    def process(self, name: str, host: str) -> Process:
        """Connect the parts. See `FigureSource` for `name` and `host`."""
        made, bundle, ports = self.made, self.bundle, dict[str, OpenPort]()
        clients = None if made.gateway is None else self._clients(made.gateway)
        bulk = None if clients is None else clients.bulk
        ready = self._readiness(clients)
        figures = self._figures(name, host, ports, bulk)
        view = self._view(figures)
        snapshots = SnapshotSource(view, ready.learn)
        self.admin_listener = ports["admin"] = self.listener.admin(
            self.settings, admin.build(view, ready, snapshots), new_id, self.counters.gateway, self.certificates
        )
        public_listener = workers = None
        if clients is not None:
            public_listener, workers = self._serve(clients, ready, ports)
        elif made.controller is not None:
            self.resources.append(self._workers_watcher(None, ready, made.controller.every))
        self._add_resources(snapshots)
        self._service = Service(
            self.settings,
            bundle.broker,
            made.gateway,
            made.pool,
            [self.admin_listener] if public_listener is None else [public_listener, self.admin_listener],
            controller=made.controller,
            membership=self.membership,
            fallback=made.fallback,
            connection=bundle.connection,
            resources=self.resources,
            workers=workers,
            further=self.further,
            every=self.pace.every,
        )
        return Process(
            self.settings, self.role, self.plans, made.pool, self._service, self.admin_listener, public_listener
        )

    def _describe(self) -> ProcessInfo:
        made, port = self.made, self.admin_listener.port
        scale: Mapping[str, tuple[int, int]] = {}
        if self.pools:
            from headway.app.scaling import scalable

            scale = scalable(self.plans, self.pools)
        every = self._every()
        return describe_process(self.settings, self.role, made.id, made.gateway, made.controller, port, scale, every)

    def _every(self) -> float:
        """Return the seconds between two heartbeats, which are more frequent during a rollout."""
        gateway = self.made.gateway
        return HEARTBEAT_EVERY if gateway is not None and gateway.rollout_counts.active else self.pace.every()

    def _serve_models(self, served: Mapping[str, Settings]) -> None:
        self.bundle.broker.know({model: queue_limits(of_model) for model, of_model in served.items()})
        if self.made.gateway is not None:
            self.made.gateway.served.serve(served)

    def _forget(self, model: str) -> None:
        self.counters.controller.forget(model)
        if (gateway := self.made.gateway) is not None:
            gateway.counters.forget(model)
            gateway.limiter.throttles.pop(model, None)
            gateway.tenant_counts.forget(model)

    def _woken(self) -> None:
        """Report immediately that a model without workers has requests, so that the controller starts a worker."""
        self.membership.soon()
        if self.made.controller is not None:
            self.made.controller.soon()

    def _served_models(self) -> Collection[str]:
        own = {plan.settings.model for plan in self.plans.values()}
        if self.fleet_models is not None:
            return {*own, *self.fleet_models.served}
        return own if self.made.gateway is None else self.made.gateway.served.models

    def _counted_models(self) -> Collection[str]:
        """Return the names of the models with metrics: models that the process serves or runs, and models without workers."""
        missed = () if self.fleet_models is None else self.fleet_models.counted
        return {*self._served_models(), *missed}

    def _leaving(self) -> bool:
        return self.membership.leaving

    def _starting(self) -> bool:
        return not self._service.up

    def _readiness(self, clients: Clients | None) -> Readiness:
        gateway, fallback = self.made.gateway, self.made.fallback
        return Readiness(
            self.bundle.broker,
            self._leaving,
            self.made.slots,
            fallback.broker if fallback is not None else None,
            gateway.served if gateway is not None else None,
            (lambda: gateway.holding) if gateway is not None else None,
            needs_workers=self.parts.needs_workers,
            needs_own=self.parts.needs_own_workers,
            starting=self._starting,
            learners=() if clients is None else self._learners(clients, None),
            expected=self.expected,
            at_zero=(lambda: gateway.served.wakes) if gateway is not None else (lambda: not self.made.slots),
            awaited=(lambda: gateway.served.awaited) if gateway is not None else dict,
            clock=self.clock,
        )

    def _figures(self, name: str, host: str, ports: Mapping[str, OpenPort], bulk: BulkJobs | None) -> FigureSource:
        made = self.made
        return FigureSource(
            settings=self.settings,
            models=self._counted_models,
            leaving=self._leaving,
            gateway=made.gateway,
            pool=made.pool,
            controller=made.controller,
            ledger_writer=self.ledger_writer,
            counters=self.counters,
            gate=self.policy.gate if self.policy is not None else None,
            bulk=None if bulk is None else bulk.feeder,
            process_name=name,
            host=host,
            ports=ports,
        )

    def _view(self, figures: FigureSource) -> ProcessView:
        bundle = self.bundle
        return ProcessView(
            self.settings,
            self.role,
            self.made.id,
            self.counters,
            bundle.broker,
            bundle.letters,
            bundle.fleet,
            bundle.board,
            self.clock,
            bundle.now,
            self.made.gateway,
            self.ledger,
            self._starting,
            figures,
            self.expected,
            bundle.memory,
            figures.troubles,
        )

    def _clients(self, gateway: Gateway) -> Clients:
        from headway.app.stores import look_for_unused_keys, make_identity
        from headway.doors.entrance import Entrance

        settings, counters, clock, broker = self.settings, self.counters, self.clock, self.bundle.broker
        identity, stores = make_identity(settings, counters.store)
        traces = None
        if self.recorder is not None:
            from headway.gateway.request_traces import RefusalTraces

            traces = RefusalTraces(self.recorder, counters.spans_dropped, settings.scheme)
        entrance = Entrance(gateway, identity, new_id, traces)
        self.resources.extend(() if self.policy is None else (self.policy,))
        self.resources.extend((*stores, *look_for_unused_keys(settings)))
        warn_of_idle(settings, idle(settings))
        warn_of_strangers(settings)
        if not settings.bulk_dir:
            return Clients(entrance)
        from headway.app.bulk import build_runner, make_bulk_jobs

        runner = build_runner(settings, gateway, broker, self.policy, clock)
        bulk = make_bulk_jobs(settings, gateway, runner, counters.bulk_lines, self.ledger_writer, identity, clock)
        self.resources.extend((runner, bulk))
        return Clients(entrance, runner, bulk)

    def _serve(self, clients: Clients, ready: Readiness, ports: dict[str, OpenPort]) -> tuple[Listener, WorkersWatcher]:
        from headway.gateway.fleet_watchers import CapacityWatcher
        from headway.http import public

        settings, entrance, gateway = self.settings, clients.entrance, clients.entrance.gateway
        watcher = CapacityWatcher(gateway, self.bundle.fleet, self.clock, self.pace)
        workers = self._workers_watcher(clients, ready, watcher.every)
        self.resources.extend((watcher, workers))
        public_listener = self.listener.public(entrance, public.build(entrance, ready, clients.bulk), self.certificates)
        ports["public"] = public_listener
        if settings.grpc_port and self.listener.takes_address:
            with needing(
                "grpc",
                "grpc_port",
                settings.grpc_port,
                "needs the packages hpack and protobuf, which are not installed",
            ):
                from headway.grpc.listener import GrpcListener
            grpc_listener = ports["grpc"] = GrpcListener(entrance, ready, self.certificates)
            self.further.append(grpc_listener)
        if settings.weights_file:
            self.resources.append(WeightsResource(settings, gateway.served, gateway.learn))
        return public_listener, workers

    def _learners(self, clients: Clients | None, ready: Readiness | None) -> list[Learner]:
        """Return the parts that use the workers' reports. `fleet_models` comes first, because it decides which models are served."""
        gateway = self.made.gateway
        served, runner = None if gateway is None else gateway.served, None if clients is None else clients.runner
        return [learner for learner in (self.fleet_models, served, gateway, ready, runner) if learner is not None]

    def _workers_watcher(self, clients: Clients | None, ready: Readiness, every: Callable[[], float]) -> WorkersWatcher:
        from headway.gateway.fleet_watchers import WorkersWatcher

        return WorkersWatcher(self._learners(clients, ready), self.bundle.broker, self.clock, every)

    def _add_resources(self, snapshots: SnapshotSource) -> None:
        settings, made, bundle, clock = self.settings, self.made, self.bundle, self.clock
        tiers = len(settings.tier_names)
        self.resources.append(
            BoardReporter(made.id, bundle.board, bundle.broker, bundle.fleet, self.counters, clock, tiers, self.pace)
        )
        if settings.broker:
            self.resources.append(snapshots)
        if self.pools and settings.broker:
            from headway.controller.autoscaler import LocalScaling, ScalingFollower

            # The fleet's controller decides, and this process adds and removes its workers.
            self.resources.append(ScalingFollower(made.id, self.plans, LocalScaling(self.pools), bundle.fleet, clock))
        if (pool := made.pool) is not None and any(plan.versioned(model) for model, plan in self.plans.items()):
            from headway.worker.helping import StrayWatcher

            self.resources.append(
                StrayWatcher(lambda: (batcher.claims for batcher in pool.batchers), bundle.broker, clock)
            )


def make_fleet_models(
    settings: Settings,
    parts: Parts,
    broker: Broker,
    serve: Callable[[Mapping[str, Settings]], None],
    forget: Callable[[str], None],
    clock: Callable[[], float],
) -> FleetModels | None:
    """Build the list of the fleet's models. Return None if this process needs no such list, or its settings name all models."""
    if not settings.broker or not (parts.gateway or parts.controller):
        return None
    from headway.fleet.models import FleetModels

    broker.know({}, others=True)
    return FleetModels(settings, serve, clock, forget, presumes=parts.gateway)


def warn_of_idle(settings: Settings, idle_settings: Sequence[tuple[str, str]]) -> None:
    """Warn about settings of the process and its models that have no effect without another setting."""
    for name, missing in idle_settings:
        log.warning("a setting has no effect", setting=flag(name), without=flag(missing))
    for model in settings.models:
        for name, missing in idle(settings.served[model.name], versions=bool(model.versions)):
            if name in dict(model.values) and (name, missing) not in idle_settings:
                log.warning("a setting has no effect", setting=f"[models.{model.name}] {name}", without=flag(missing))


def tell_of_other_roles(settings: Settings, parts: Parts) -> None:
    """Log changed settings that only other roles use. They aren't an error, because roles may share a settings file."""
    unused = FIELDS.keys() - {*parts.settings, "port"}  # A role without a public port always has port 0.
    changed = sorted(name for name in unused if getattr(settings, name) != FIELDS[name].default)
    if changed:
        log.info("settings for other roles have no effect here", settings=", ".join(changed))


def warn_of_strangers(settings: Settings) -> None:
    """Warn if other machines can reach the public port and requests need no key."""
    if is_loopback(settings.host) or settings.keys or settings.jwt or settings.tls_client_ca:
        return
    hint = (
        "Set --keys, --jwt or --tls-client-ca, or bind the port to 127.0.0.1 behind a proxy that authenticates clients."
    )
    log.warning("the public port is open to other machines, and requests need no key",
                host=settings.host, let_in=f"everybody, as {settings.default_tier}", hint=hint)  # fmt: skip
