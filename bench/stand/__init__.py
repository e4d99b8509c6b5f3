"""The stand that all of them use: servers, load generators, findings."""
