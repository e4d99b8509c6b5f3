"""Identity of callers, by API key or JSON Web Token."""
