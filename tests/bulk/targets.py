"""Targets for services in bulk job tests."""


def harmless(texts: list[str]) -> list[bool]:
    return ["evil" not in text for text in texts]
