"""LoRA adapters: files, what of them is resident, and requests that wait for one."""
