"""Programs beside the engine: benchmarks, plans, simulations, conversion, deployment, the ranker, pictures."""
