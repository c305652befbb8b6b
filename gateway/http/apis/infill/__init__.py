"""llama.cpp's /infill over completions."""
