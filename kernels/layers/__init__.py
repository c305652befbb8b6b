"""The dense operations of a model: products, norms, embeddings, rotation."""
