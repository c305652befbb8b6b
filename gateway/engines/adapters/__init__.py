"""LoRA adapters by name: loading, a watched folder, and the administrators' endpoints."""
