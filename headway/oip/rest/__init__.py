"""The Open Inference Protocol over HTTP: requests, answers, and what is said of models."""
