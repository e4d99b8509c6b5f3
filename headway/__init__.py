"""Headway turns single inference requests into full batches for scarce GPUs, and brings each answer back.

The map of the house. Imports only point down the floors, which a test enforces.

0 words
    `model` the nouns · `errors` one tree · `config` all settings · `target` what is served · `tally` plain counters
1 core, pure: no asyncio, clock, randomness, logging, input or output; `now` is an argument
    `core/` when a batch leaves (`core/policies/`), who rides, who gets in, what a failure leads to
2 promises
    `ports` the Protocols between services and adapters
3 adapters, one outside thing per file
    `brokers/` where entries wait · `backends/` ways to the black box · `identity` who asks · `log` lines
4 services, short loops that drive the core through ports
    `batcher` claims and runs · `gateway` holds what waits for an answer · `supervisor` keeps loops alive
    `lifecycle` start and drain order · `attendance` one process's place in the fleet · `controller` what workers can carry
    `pulse` what is done each second · `signals` what a process makes of them
5 doors
    `http/` · `metrics` · `banner` what start-up prints · `simulator/` the production policies under virtual time · `load/` the load generator
6 wiring
    `wiring` the only place that chooses adapters
7 the command
    `cli/` one file per command
"""

__version__ = "0.1.0"
