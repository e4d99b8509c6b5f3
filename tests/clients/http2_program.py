"""Sends httpx requests over HTTP/2 until its input is closed. The rate doesn't depend on earlier requests.

    python http2_program.py URL AUTHORITY RATE

It prints `up` after the first answer. At the end it prints a JSON count of requests by outcome: `ok`, a status, or an error.
"""

import asyncio
import json
import sys
from collections import Counter

import httpx  # type: ignore[import-not-found]


async def main() -> None:
    url, authority, rate = sys.argv[1], sys.argv[2], float(sys.argv[3])
    outcomes: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=4)
    async with httpx.AsyncClient(http1=False, http2=True, verify=authority, timeout=40, limits=limits) as client:

        async def ask(number: int) -> None:
            text = f"over http/2 {number}"
            try:
                answer = await client.post(f"{url}/v1/inference", json={"input": text})
            except httpx.HTTPError as exc:
                outcomes[f"{type(exc).__name__}: {exc}"] += 1
                return
            told = answer.status_code == 200 and answer.http_version == "HTTP/2" and answer.json()["output"]
            outcomes["ok" if told == text.upper() else f"{answer.status_code} {answer.text[:200]}"] += 1

        await ask(0)
        sys.stdout.write("up\n")
        sys.stdout.flush()
        loop = asyncio.get_running_loop()
        over = loop.run_in_executor(None, sys.stdin.read)
        began, number, asked = loop.time(), 0, set()
        while not over.done():
            number += 1
            await asyncio.sleep(max(0.0, began + number / rate - loop.time()))
            task = asyncio.ensure_future(ask(number))
            asked.add(task)
            task.add_done_callback(asked.discard)
        await asyncio.gather(*asked)
    sys.stdout.write(json.dumps(outcomes))


asyncio.run(main())
