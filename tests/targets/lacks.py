import no_such_package_at_all  # type: ignore[import-not-found]  # noqa: F401
