"""The training: model, pipeline, inner and outer optimisers, compression, collectives."""
