"""The controller: the leading one publishes capacities, scales models and moves rollouts on."""
