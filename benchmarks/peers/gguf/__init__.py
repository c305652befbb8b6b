"""Parts of bench_gguf: what is asked, who is asked, and what the answers say."""
