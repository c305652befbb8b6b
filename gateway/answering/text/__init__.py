"""Between text and tokens: chat templates, detokenizing, thinking, stops, tools."""
