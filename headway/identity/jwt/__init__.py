"""JSON Web Tokens: their issuers, the issuers' keys, and the checks of a token."""
