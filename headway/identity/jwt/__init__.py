"""JSON Web Tokens: who may vouch for callers, with what keys, and what their tokens must say."""
