"""Clients of bulk jobs, alongside a crowd: they send files of lines, begin jobs, cancel a few, and fetch the results.

Their strings contain `bulk`, which no client of a crowd uses. Unanswered requests aren't repeated, but a job that began without an answer is found
at the end, and judged too.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from tests.promises.client import Door
from tests.promises.operation import BAD, Job
from tests.promises.texts import LARGE_BYTES

LINES = 1_000, 4_000
"""Minimum and maximum lines of a job."""
EVERY = 6.0
"""Mean seconds between two jobs."""
SEVERAL, PARTS = 0.1, (2, 6)
"""Share of the lines with several inputs, and the minimum and maximum of these."""
REJECTED, LARGE, CANCELLED = 0.01, 0.002, 0.25
"""Shares of lines that the model rejects, of large lines, and of jobs that are cancelled half-way."""
ENDPOINT = "/v1/completions"
LOOK_EVERY = 0.5
PATIENCE = 180.0
"""Seconds after the load within which each job must end. After a kill, the next holder waits for the 30 s lease to expire."""
ANSWERED = 40.0
"""Seconds before a client asks another gateway."""
ENDED = ("completed", "cancelled", "failed", "expired")


class BulkClients:
    """Clients of bulk jobs. Build it in a running loop. `poison` is the share of lines that make their batch raise."""

    def __init__(
        self, doors: list[Door], tenants: Mapping[str, str], jobs: list[Job], seed: int, poison: float,
        parameters: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._doors, self._tenants, self._jobs = doors, tenants, jobs
        self._seed, self._poison, self._parameters = seed, poison, parameters
        self._rng = random.Random(f"bulk {seed}")
        self._sent: dict[str, Job] = {}
        """Jobs by their file of lines, if it was accepted."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWERED))

    async def run(self, seconds: float) -> None:
        """Begin jobs for `seconds`."""
        loop = asyncio.get_running_loop()
        end, begun = loop.time() + seconds, set[asyncio.Task[None]]()
        try:
            while loop.time() < end:
                begun.add(loop.create_task(self._begin(len(begun))))
                await asyncio.sleep(self._rng.expovariate(1.0 / EVERY))
            await asyncio.gather(*begun)
        finally:
            for task in begun:
                task.cancel()

    async def audit(self) -> None:
        """Wait until each job has ended, and fetch its files."""
        try:
            async with asyncio.timeout(PATIENCE):
                for tenant in self._tenants:
                    for batch in (await self._ask(tenant, "/v1/batches?limit=100"))["data"]:
                        job = self._sent.get(batch["input_file_id"])
                        if job is not None and job.id not in ("", batch["id"]):
                            raise AssertionError(f"two jobs of one file: {job.id}, {batch['id']}")
                        if job is not None:
                            job.id = batch["id"]
                self._jobs += [job for job in self._sent.values() if job.id]
                await asyncio.gather(*map(self._fetch, self._jobs))
        except TimeoutError:
            pass  # The job's status shows that it hasn't ended.
        finally:
            await self._session.close()

    async def _begin(self, number: int) -> None:
        """Send a job. Some are cancelled half-way."""
        rng = self._rng
        tenant, cancels = rng.choice(list(self._tenants)), rng.random() < CANCELLED
        lines = {f"{number}-{at}": self._texts(number, at) for at in range(rng.randint(*LINES))}
        values = {name: rng.choice(("", *self._parameters)) for name in lines} if self._parameters else {}
        job = Job(tenant, "", time.monotonic(), lines, {name: value for name, value in values.items() if value})
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", "\n".join(map(json.dumps, _written(job))), filename=f"{number}.jsonl")
        file = await self._ask(tenant, "/v1/files", form, tries=1)
        if not file:
            return
        self._sent[file["id"]] = job
        asked = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        batch = await self._ask(tenant, "/v1/batches", json.dumps(asked), tries=1)
        job.id = batch.get("id", "")
        while cancels and job.id and batch["status"] not in ENDED:
            await asyncio.sleep(LOOK_EVERY)
            batch = await self._ask(tenant, f"/v1/batches/{job.id}")
            if batch["request_counts"]["completed"] > len(lines) / 2:
                job.cancelled = True
                await self._ask(tenant, f"/v1/batches/{job.id}/cancel", "", tries=1)
                return

    def _texts(self, number: int, at: int) -> tuple[str, ...]:
        count = self._rng.randint(*PARTS) if self._rng.random() < SEVERAL else 1
        return tuple(self._text(number, f"{at}.{place}", count) for place in range(count))

    def _text(self, number: int, at: str, of: int) -> str:
        """Return one of the strings of a line that has `of` of them."""
        luck, large = self._rng.random(), self._rng.random() < LARGE
        poison, rejected = self._poison / of, REJECTED / of
        kind = BAD[1] if luck < poison else BAD[0] if luck < poison + rejected else "bulk"
        tail = " x" * (self._rng.randint(*LARGE_BYTES) // 2) if large else ""
        return f"{kind} bulk {self._seed:x}-{number}-{at}{tail}"

    async def _fetch(self, job: Job) -> None:
        path = f"/v1/batches/{job.id}"
        while (batch := await self._ask(job.tenant, path))["status"] not in ENDED:
            job.status, job.counts = batch["status"], batch["request_counts"]
            await asyncio.sleep(LOOK_EVERY)
        job.counts = batch["request_counts"]
        job.answers += [_outputs(record) for record in await self._records(job, batch["output_file_id"])]
        job.errors += [_code(record) for record in await self._records(job, batch["error_file_id"])]
        job.status = batch["status"]

    async def _records(self, job: Job, file: str | None) -> list[dict[str, Any]]:
        if not file:
            return []
        content = await self._ask(job.tenant, f"/v1/files/{file}/content", whole=True)
        return [json.loads(line) for line in content.splitlines()]

    async def _ask(self, tenant: str, path: str, body: Any = None, *, tries: int = 1_000, whole: bool = False) -> Any:
        """Return the first answer of any gateway, or None after `tries`."""
        fields = {"Authorization": self._tenants[tenant]}
        fields |= {"Content-Type": "application/json"} if isinstance(body, str) else {}
        while tries:
            doors = [door for door in self._doors if door.is_open()]
            if doors:
                tries -= 1
                door = self._rng.choice(doors)
                method, url = "GET" if body is None else "POST", f"http://{door.host}:{door.port}{path}"
                try:
                    async with self._session.request(method, url, data=body, headers=fields) as answer:
                        if answer.status == 200:
                            content = await answer.read()
                            return content if whole else json.loads(content)
                except (aiohttp.ClientError, TimeoutError, OSError):
                    pass
            if tries:
                await asyncio.sleep(LOOK_EVERY)
        return {}


def _written(job: Job) -> Iterator[dict[str, Any]]:
    for custom_id, texts in job.lines.items():
        parameters = json.loads(job.parameters.get(custom_id, "{}"))
        body = {"model": "default", "prompt": texts if len(texts) > 1 else texts[0], **parameters}
        yield {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}


def _outputs(record: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    choices = sorted(record["response"]["body"]["choices"], key=lambda choice: int(choice["index"]))
    return record["custom_id"], tuple(choice["text"] for choice in choices)


def _code(record: dict[str, Any]) -> tuple[str, str]:
    error = record["error"] or record["response"]["body"]["error"]
    return record["custom_id"], error["code"]
