"""JSON Web Tokens: their issuers, the issuers' keys, and token verification."""
