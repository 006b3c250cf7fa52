"""JAX text generation with the KV cache in host memory (InfiniGen, OSDI 2024)."""
