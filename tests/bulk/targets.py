"""Targets of services whose bulk jobs are looked at."""


def harmless(texts: list[str]) -> list[bool]:
    return ["evil" not in text for text in texts]
